"""Scripts with transformers, Accelerate and Lightning: before in one process, after on two ranks."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path

from recipes.harness import RECIPES, Work, Wrong, compared

# Lines that a script on weft has and the script before had not, at most.
MOST = 3


def huggingface(work: Work) -> str:
    """The losses, and the norms of the gradients before they are clipped."""
    seen = _both(work, "huggingface", "huggingface", _of_json("losses.json"))
    _compared(work, "huggingface", _of_json("norms.json"))
    _same_states(work, "huggingface", "model/model.safetensors")
    return f"{seen}; norms and saved weights too"


def accelerate(work: Work) -> str:
    """The losses of a loop of one's own."""
    return _both(work, "huggingface", "accelerate_loop", _of_json("losses.json"))


def lightning(work: Work) -> str:
    """The losses, and a figure, as `self.log` has written them."""
    seen = _both(work, "lightning", "lightning_module", _of_csv("loss"))
    _compared(work, "lightning_module", _of_csv("right"))
    _same_states(work, "lightning_module", "checkpoints/*.ckpt")
    return f"{seen}; another figure and the checkpoint of the last epoch too"


def written(before: str, after: str) -> list[str]:
    """The lines of code that a script has and another had not; its docstring and empty lines are none."""
    there, found = set(before.splitlines()), []
    for line in after.splitlines()[1:]:
        if line.strip() and line not in there:
            found.append(line)
    return found


def pair(folder: str) -> tuple[str, str]:
    """The text of a script before and after."""
    before, after = (RECIPES / folder / f"{name}.py" for name in ("before", "after"))
    return before.read_text(), after.read_text()


def _both(work: Work, packages: str, folder: str, read: Callable[[Path], list[float]]) -> str:
    lines = len(written(*pair(folder)))
    if lines > MOST:
        raise Wrong(f"{lines} lines of {folder}/after.py are other, at most {MOST} may be")
    python = work.python_with(packages)
    before, after = (work.folder(f"{folder}-{name}") for name in ("before", "after"))
    script = f"recipes/{folder}"
    work.run([python, f"{script}/before.py", "--out", str(before)], f"{folder}-before")
    start = [python, "-m", "weft", "run", "-n", "2", f"{script}/after.py", "--out", str(after)]
    work.run(start, f"{folder}-after")
    return f"{_compared(work, folder, read)}, {lines} lines changed"


def _same_states(work: Work, folder: str, pattern: str) -> None:
    """The one file that both scripts have saved under a name like that holds the same tensors."""
    files = [
        str(path)
        for name in ("before", "after")
        for path in (work.out / f"{folder}-{name}").glob(pattern)
    ]
    if len(files) != 2:
        raise Wrong(f"{folder}: {pattern} is saved as {files}, expected one of each script")
    work.run([work.python, "recipes/checks/same_states.py", *files], f"{folder}-states")


def _compared(work: Work, folder: str, read: Callable[[Path], list[float]]) -> str:
    before, after = (read(work.out / f"{folder}-{name}") for name in ("before", "after"))
    if not before:
        raise Wrong(f"{folder}/before.py has logged nothing")
    return compared(list(enumerate(after, 1)), before)


def _of_json(name: str) -> Callable[[Path], list[float]]:
    return lambda folder: list(map(float, json.loads((folder / name).read_text())))


def _of_csv(column: str) -> Callable[[Path], list[float]]:
    def read(folder: Path) -> list[float]:
        with (folder / "metrics.csv").open(newline="") as opened:
            return [float(row[column]) for row in csv.DictReader(opened) if row[column]]

    return read
