"""The ground of all recipes: the losses that each must show, commands with a time limit, packages of their own."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import venv
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPES = ROOT / "recipes"
TRAIN = "recipes/train.py"
# After this step the first process is killed, where a recipe shows that it goes on; checkpoints are made every 5 steps.
DIES_AT = 8
# A loss and the single process's are as far apart as sums of float32 in another order.
RELATIVE, ABSOLUTE = 1e-4, 1e-6
# Seconds that one command may take, on a machine that does other things too.
SECONDS = 240.0
_TAIL = 3000


class Missing(Exception):
    """This machine lacks something that a recipe needs; says what."""


class Wrong(Exception):
    """A recipe has shown something else than it must."""


def is_installed(requirement: str) -> bool:
    """True where this Python has a package, as "name", "name==version" or "name[extra]==version"."""
    name, _, version = requirement.partition("==")
    try:
        return version in ("", metadata.version(name.partition("[")[0]))
    except metadata.PackageNotFoundError:
        return False


@dataclass(frozen=True)
class Work:
    """The place of a run of recipes.

    Attributes:
        out: folder of all that recipes write.
        python: with weft and torch.
        install: true to install packages that recipes need, below `out`.
    """

    out: Path
    python: str = sys.executable
    install: bool = True
    environment: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))

    @cached_property
    def variables(self) -> dict[str, str]:
        """The environment of all commands: nothing asks a network, one thread for each process."""
        quiet = {
            "HF_HUB_OFFLINE": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_TRAIN_V2_ENABLED": "1",
            "WANDB_MODE": "offline",
            "WANDB_SILENT": "true",
        }
        path = os.pathsep.join(
            filter(None, (str(ROOT / "src"), self.environment.get("PYTHONPATH")))
        )
        return {
            **self.environment,
            **quiet,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "PYTHONUNBUFFERED": "1",
        }

    @cached_property
    def expected(self) -> list[float]:
        """The losses of one process of plain PyTorch."""
        path = self.out / "plain.json"
        self.run([self.python, "recipes/plain.py", "--out", str(path)], "plain")
        return list(map(float, json.loads(path.read_text())))

    def python_with(self, packages: str) -> str:
        """A Python that has torch, weft and what `recipes/packages/NAME.txt` names, in an environment of its own.

        What the Python of this process has is seen there too, so that torch is not installed again; where it has them
        all, it is taken itself.

        Raises:
            Missing: the packages are not there, and are not to be installed, or cannot be.
        """
        folder = self.out / "packages" / packages
        python, ready = folder / "bin" / "python", folder / "ready"
        wanted = (RECIPES / "packages" / f"{packages}.txt").read_text()
        if ready.exists() and ready.read_text() == wanted:
            return str(python)
        if all(map(is_installed, wanted.split())):
            return self.python
        if not self.install:
            raise Missing(f"the packages of recipes/packages/{packages}.txt; leave --offline out")
        venv.create(folder, with_pip=True, clear=True)
        (site,) = folder.glob("lib/python3*/site-packages")
        here = [path for path in sys.path if path.endswith("site-packages")]
        (site / "seen.pth").write_text("\n".join(here))
        listed = str(RECIPES / "packages" / f"{packages}.txt")
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        constraints = ["--constraint", str(ROOT / "constraints.txt")]
        try:
            self.run([*pip, *constraints, "--requirement", listed], f"install-{packages}", 900.0)
        except Wrong as error:
            raise Missing(f"the packages of recipes/packages/{packages}.txt: {error}") from error
        ready.write_text(wanted)
        return str(python)

    def folder(self, name: str) -> Path:
        """An empty folder for a run of that name."""
        path = self.out / name
        if path.exists():
            subprocess.run(["rm", "-rf", str(path)], check=True)
        path.mkdir(parents=True)
        return path

    def run(
        self,
        command: Sequence[str],
        name: str,
        seconds: float = SECONDS,
        ends: int | None = 0,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Run a command at the root of the tree; gives what it wrote, which stands in the file `NAME.log` too."""
        return self.together([command], name, seconds, ends, variables)

    def together(
        self,
        commands: Sequence[Sequence[str]],
        name: str,
        seconds: float = SECONDS,
        ends: int | None = 0,
        variables: Mapping[str, str] | None = None,
    ) -> str:
        """Run commands at the same time, as on several hosts.

        Args:
            commands: each is a program and its arguments.
            name: of the log.
            seconds: after which all are killed.
            ends: the exit code that all must have; None for one that is not 0.
            variables: of the environment, besides `self.variables`.

        Returns:
            All that they wrote.

        Raises:
            Wrong: one took too long, or ended otherwise.
        """
        self.out.mkdir(parents=True, exist_ok=True)
        log = self.out / f"{name}.log"
        with log.open("w") as written:
            started = [
                subprocess.Popen(
                    command,
                    cwd=ROOT,
                    env={**self.variables, **(variables or {})},
                    stdin=subprocess.DEVNULL,
                    stdout=written,
                    stderr=subprocess.STDOUT,
                )
                for command in commands
            ]
            try:
                codes = [process.wait(seconds) for process in started]
            except subprocess.TimeoutExpired:
                raise Wrong(f"not ended after {seconds:.0f} s; {_end(log)}") from None
            finally:
                for process in started:
                    process.kill()
                    process.wait()
        if any(bool(code) if ends == 0 else not code for code in codes):
            raise Wrong(f"ended with exit codes {codes}; {_end(log)}")
        return log.read_text()

    def losses(self, folder: Path, killed: bool = False) -> str:
        """Compare the losses of a run with those of plain PyTorch; see `compared`."""
        path = folder / "losses.jsonl"
        if not path.exists():
            raise Wrong(f"wrote no {path}")
        lines = map(json.loads, path.read_text().splitlines())
        return compared([(line["step"], line["loss"]) for line in lines], self.expected, killed)


def compared(
    found: Iterable[tuple[int, float]], expected: Sequence[float], killed: bool = False
) -> str:
    """Compare losses with those of one process.

    Args:
        found: steps, counted from 1, and their losses, as they came.
        expected: of all steps.
        killed: true where the run was killed after step 8 and started again; its log has each step once all the same.

    Returns:
        What was seen, in words.

    Raises:
        Wrong: a loss differs, a step is missing, or came again.
    """
    pairs = list(found)
    times = Counter(step for step, _ in pairs)
    wanted = Counter(range(1, len(expected) + 1))
    if times != wanted:
        raise Wrong(
            f"losses of the steps {sorted(times.elements())}, expected {sorted(wanted.elements())}"
        )
    for step, loss in pairs:
        if not math.isclose(loss, expected[step - 1], rel_tol=RELATIVE, abs_tol=ABSOLUTE):
            raise Wrong(f"step {step} has the loss {loss}, plain PyTorch {expected[step - 1]}")
    furthest = max(abs(loss - expected[step - 1]) for step, loss in pairs)
    went_on = f", killed after step {DIES_AT} and started again" if killed else ""
    return f"{len(expected)} losses within {furthest:.0e}{went_on}"


def _end(log: Path) -> str:
    return f"{log} ends with\n{log.read_text(errors='replace')[-_TAIL:]}"
