"""The gates of the project, each one command: `python -m tools.gates` runs them all and tells which failed."""

from __future__ import annotations

import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
PYTHON = sys.executable
# Gates that run at the same time.
AT_A_TIME = 2


@dataclass(frozen=True)
class Gate:
    """A named command that exits with 0 when the tree is in order.

    Attributes:
        name: what the gate guards.
        command: program and arguments, run at the root of the tree.
    """

    name: str
    command: tuple[str, ...]

    def run(self, root: Path) -> subprocess.CompletedProcess[str]:
        """Run the gate on the tree at `root`; stdout holds all its output."""
        return subprocess.run(
            self.command, cwd=root, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def timed(self, root: Path) -> tuple[subprocess.CompletedProcess[str], float]:
        """Run the gate, and tell how many seconds it took."""
        start = time.monotonic()
        return self.run(root), time.monotonic() - start


# Pages whose blocks run.
RUN = (
    "README.md",
    "docs/checkpoints.md",
    "docs/data.md",
    "docs/loop.md",
    "docs/report.md",
    "docs/errors.md",
    "docs/planning.md",
    "docs/search.md",
    "docs/strategies.md",
    "docs/live_model.md",
    "docs/traces.md",
    "docs/tutorial/two_ranks.md",
    "docs/tutorial/pipeline.md",
    "docs/tutorial/auto.md",
    "docs/how_to/huggingface.md",
    "docs/how_to/layouts.md",
    "docs/how_to/lora.md",
    "docs/how_to/own_op.md",
    "docs/how_to/slow_links.md",
    "docs/reference/strategy_files.md",
    "docs/reference/tensors.md",
)
GATES = (
    # It takes as long as all others together, and so begins first.
    Gate("types", (PYTHON, "-m", "mypy")),
    Gate("lint", (str(BIN / "ruff"), "check", ".")),
    Gate("format", (str(BIN / "ruff"), "format", "--check", ".")),
    Gate("layers", (str(BIN / "lint-imports"),)),
    Gate("readme", (PYTHON, "-m", "pytest", "-q", "-p", "tools.readme", *RUN)),
    Gate("site", (PYTHON, "-m", "mkdocs", "build", "--strict")),
    Gate("pages", (PYTHON, "-m", "tools.pages")),
    Gate("words", (PYTHON, "-m", "tools.words")),
    Gate("house", (PYTHON, "-m", "tools.house")),
    Gate("leaves", (PYTHON, "-m", "tools.leaves")),
    Gate("mirror", (PYTHON, "-m", "tools.mirror")),
    Gate("scores", (PYTHON, "-m", "tools.scores")),
)


def main() -> int:
    """Run every gate; print one line for each, and the output of those that fail. Returns the exit code."""
    failed = []
    with ThreadPoolExecutor(AT_A_TIME) as pool:
        outcomes = pool.map(lambda gate: gate.timed(Path.cwd()), GATES)
        for gate, (result, seconds) in zip(GATES, outcomes, strict=True):
            verdict = "FAILED" if result.returncode else "ok"
            print(f"gate {gate.name:8} {verdict:6} {seconds:6.1f} s", flush=True)
            if result.returncode:
                failed.append(gate.name)
                print(result.stdout, flush=True)
    if failed:
        print(f"gates that failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
