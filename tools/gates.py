"""The gates of the project, each one command: `python -m tools.gates` runs them all and tells which failed."""

from __future__ import annotations

import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

BIN = Path(sys.executable).parent
PYTHON = sys.executable


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


GATES = (
    Gate("lint", (str(BIN / "ruff"), "check", ".")),
    Gate("format", (str(BIN / "ruff"), "format", "--check", ".")),
    Gate("types", (PYTHON, "-m", "mypy")),
    Gate("layers", (str(BIN / "lint-imports"),)),
    Gate("readme", (PYTHON, "-m", "pytest", "-q", "-p", "tools.readme", "README.md")),
    Gate("pages", (PYTHON, "-m", "tools.pages")),
    Gate("words", (PYTHON, "-m", "tools.words")),
    Gate("leaves", (PYTHON, "-m", "tools.leaves")),
    Gate("mirror", (PYTHON, "-m", "tools.mirror")),
)


def main() -> int:
    """Run every gate; print one line for each, and the output of those that fail. Returns the exit code."""
    failed = []
    for gate in GATES:
        start = time.monotonic()
        result = gate.run(Path.cwd())
        verdict = "FAILED" if result.returncode else "ok"
        print(f"gate {gate.name:8} {verdict:6} {time.monotonic() - start:6.1f} s", flush=True)
        if result.returncode:
            failed.append(gate.name)
            print(result.stdout, flush=True)
    if failed:
        print(f"gates that failed: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
