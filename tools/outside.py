"""weft as it is installed, outside of the repository: a line for each thing that works; an error for one that does not.

    python outside.py README.md                 with torch
    python outside.py README.md step.graph      without: what needs no torch must work, the rest must say so

It imports nothing of the repository, and writes to the current folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
from contextlib import redirect_stdout
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import weft


def installed() -> str:
    """It is that of this environment, and its version that of its metadata."""
    home = Path(weft.__file__)
    if not home.is_relative_to(sys.prefix):
        raise SystemExit(f"weft is imported from {home}, expected one below {sys.prefix}")
    if not (home.parent / "py.typed").is_file():
        raise SystemExit(f"{home.parent} has no py.typed: type checkers would not read it")
    told = command("--version").strip()
    if told != f"weft {version('weft')}":
        raise SystemExit(f"weft --version says {told!r}, the metadata {version('weft')!r}")
    return told


def first_block(readme: str) -> dict[str, Any]:
    """The first block of the README runs; gives its names."""
    (block, *_) = re.findall(r"^```python\n(.*?)^```", Path(readme).read_text("utf-8"), re.M | re.S)
    names: dict[str, Any] = {"__name__": "__main__"}
    with redirect_stdout(sys.stderr):
        exec(compile(block, readme, "exec"), names)
    return names


def captured(names: dict[str, Any]) -> str:
    """The graph file of what the README trains."""
    parts = (names[name] for name in ("model", "loss_fn", "optimizer", "batch"))
    weft.Job(*parts).stored().save("step.graph")
    return "step.graph"


def looked_over() -> str:
    """`weft doctor` says that weft can run here."""
    code, text = import_module("weft.cli.look").check_this_machine()
    if code:
        raise SystemExit(text)
    return "weft doctor"


def told_of_torch() -> str:
    """`weft doctor` says that there is no torch."""
    told = command("doctor", code=2)
    if "needs PyTorch" not in told:
        raise SystemExit(f"weft doctor without torch says {told!r}")
    return "weft doctor says that torch is missing"


def simulated(graph: str) -> str:
    """A machine of the catalogue is there, and the page has its scripts."""
    told = command("simulate", graph, "--topology", "h100x4", "--report", "page.html")
    page = Path("page.html").read_text("utf-8")
    if "step" not in told or not all(part in page for part in ("function timelines", "--mark:")):
        raise SystemExit(f"the report of a simulation lacks its scripts; the command said {told}")
    return "a simulation and its report"


def command(*words: str, code: int = 0) -> str:
    """What the command `weft` of this environment says."""
    program = Path(sys.prefix, "bin", "weft")
    ended = subprocess.run([program, *words], capture_output=True, text=True, timeout=120)
    told = ended.stdout + ended.stderr
    if ended.returncode != code:
        raise SystemExit(f"weft {' '.join(words)} ended with {ended.returncode}: {told}")
    return told


def main() -> None:
    """Look at one thing after the other; the first that fails ends it with an error."""
    readme, *graphs = sys.argv[1:]
    print(installed())
    if graphs:
        print(told_of_torch())
        print(simulated(graphs[0]))
        return
    names = first_block(readme)
    print("the first block of the README")
    print(looked_over())
    print(simulated(captured(names)))


if __name__ == "__main__":
    main()
