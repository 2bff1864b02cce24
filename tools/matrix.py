"""The tests on other versions of Python and torch: `make matrix` (`python -m tools.matrix`) writes docs/matrix.md.

python -m tools.matrix                              every pair (hours)
python -m tools.matrix --python 3.12 --torch oldest one of them; the other rows of the page stay
python -m tools.matrix --tests tests/torch_private tests/capture     these tests only, no row

For each Python that is there under its name, such as python3.12, and for the oldest torch that weft supports and the
newest that pip finds, a virtual environment below runs/matrix with the versions of constraints.txt. Only torch for
CPUs is taken, as `torch==2.11.0+cpu`: PyTorch's own index has it (`PIP_EXTRA_INDEX_URL`), or a folder
(`PIP_FIND_LINKS`); what PyPI has for Linux brings gigabytes of CUDA. Where pip finds none, the tests run that need no
torch.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import final

from tools.scores.stamp import Stamp, stamp_now

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "matrix.md"
VENVS = ROOT / "runs" / "matrix"
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
OLDEST = "2.11.0"
COMMAND = "make matrix"
SOURCES = ("src/weft", "tests")
# Seconds that installing, and running all tests, may take.
INSTALL, TESTS = 900, 5400
# What the tests need that need no torch.
BARE = (
    *("expecttest", "filelock", "hypothesis", "networkx", "numpy", "pytest", "pytest-timeout"),
    *("pytest-xdist", "pyyaml", "rich", "scipy", "sybil", "typer"),
)
HEAD = """# Versions

The Pythons and torches on which the tests have run.

{stamp}

The tests on each Python that weft supports (those below that the machine had), with the oldest torch that it supports
and the newest for CPUs that pip found; other packages as `constraints.txt` says. *none*: pip found no such torch on
that machine, so only those tests of {bare} ran that need none, without the slow ones.
[Private names of torch](private_apis.md) says what a new torch may break.

| Python | torch | tests |
|---|---|---|
"""
# Of what needs no torch; tests that do all the same are skipped.
FREE = (
    *("actors", "boxing", "compiler", "hardware", "ir", "layout", "ops", "planning"),
    *("search", "simulator", "strategy", "traces"),
)


@final
@dataclass(frozen=True)
class Cell:
    """A Python, and a torch for CPUs.

    Attributes:
        python: its version, as "3.12".
        program: that starts it.
        torch: a version; "" where pip finds none.
        wanted: "oldest", "newest", or both.
    """

    python: str
    program: str
    torch: str
    wanted: str

    @property
    def name(self) -> str:
        return f"{self.torch or 'none'} ({self.wanted})"

    @property
    def folder(self) -> str:
        """The name of its virtual environment."""
        return f"{self.python}-{self.torch or 'without'}"


def interpreters(versions: Sequence[str] = PYTHONS) -> Iterator[tuple[str, str]]:
    """The versions of Python that are there, each with the program that starts it; says which are missing."""
    for version in versions:
        program = interpreter(version)
        if program:
            yield version, program
        else:
            print(f"python{version} is missing: install it, or put it on PATH under this name")


def interpreter(version: str) -> str:
    """The program of a version that starts, on PATH or among those that pyenv keeps; "" where there is none."""
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"), "versions")
    found = [shutil.which(f"python{version}"), *kept.glob(f"{version}.*/bin/python{version}")]
    for program in map(str, filter(None, found)):
        ended = subprocess.run([program, "-c", "pass"], capture_output=True)
        if ended.returncode == 0:
            return program
    return ""


def cpu_versions(program: str) -> list[str]:
    """The versions of torch for CPUs that pip finds for a Python, the oldest first."""
    told = said([program, "-m", "pip", "index", "versions", "torch"], INSTALL, check=False)
    mark = r"\+cpu" if sys.platform.startswith("linux") else ""
    found = set(re.findall(rf"(\d+\.\d+\.\d+){mark}(?=[,)\s]|$)", told))
    return sorted(found, key=_numbers)


def cells(versions: Sequence[str] = PYTHONS) -> Iterator[Cell]:
    """Every pair."""
    for version, program in interpreters(versions):
        there = [one for one in cpu_versions(program) if _numbers(one) >= _numbers(OLDEST)]
        oldest, newest = (OLDEST if OLDEST in there else ""), (there[-1] if there else "")
        if oldest == newest:
            yield Cell(version, program, oldest, "oldest and newest")
        else:
            yield Cell(version, program, oldest, "oldest")
            yield Cell(version, program, newest, "newest")


def constraints(text: str, torch: str) -> str:
    """The constraints with another torch, or with none where it is ""."""
    other = f"torch=={_pinned(torch)}" if torch else ""
    return re.sub(r"^torch==.*$", other, text, flags=re.MULTILINE)


def environment(cell: Cell, folder: Path) -> tuple[Path, list[str]]:
    """The Python of a new virtual environment for a pair, and what has pip install there by constraints.txt."""
    said([cell.program, "-m", "venv", "--clear", str(folder)], INSTALL)
    python, pins = folder / "bin" / "python", folder / "constraints.txt"
    pins.write_text(constraints((ROOT / "constraints.txt").read_text(), cell.torch))
    return python, [str(python), "-m", "pip", "install", "--quiet", "--constraint", str(pins)]


def installed(cell: Cell) -> Path:
    """The Python of a virtual environment with what a pair needs.

    Raises:
        RuntimeError: when pip cannot install it.
    """
    folder = VENVS / cell.folder
    if (folder / "ready").exists():
        return folder / "bin" / "python"
    python, pip = environment(cell, folder)
    torch = [f"torch=={_pinned(cell.torch)}", "--editable", ".[test]"]
    said([*pip, *(torch if cell.torch else BARE)], INSTALL)
    (folder / "ready").touch()
    return python


def tested(cell: Cell, only: Sequence[str]) -> str:
    """The last line of pytest on a pair, and which tests failed; of `only` some tests, of all where none are named."""
    python = installed(cell)
    command = [str(python), "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numprocesses", "2"]
    if not cell.torch:
        only = only or [f"tests/{folder}" for folder in FREE]
        command += ["-p", "tools.without_torch", "-m", "not slow"]
    every = [] if only else ["--thorough"]
    own = {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    ended = said([*command, *every, *only], TESTS, check=False, variables=own).splitlines()
    ended = ended or ["pytest said nothing"]
    failed = [line.split(" - ")[0] for line in ended if line.startswith(("FAILED", "ERROR"))]
    return "; ".join([re.sub(r" in [\d.]+s.*", "", ended[-1]).strip("= "), *failed[:5]])


def _pinned(torch: str) -> str:
    return f"{torch}+cpu" if sys.platform.startswith("linux") else torch


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


def said(
    command: Sequence[str],
    seconds: float,
    folder: Path = ROOT,
    check: bool = True,
    variables: Mapping[str, str] = MappingProxyType({}),
) -> str:
    """The output of a program, in a folder, without the paths of Python and the variables of weft that stand here.

    Raises:
        RuntimeError: when it fails, with its end; not without `check`.
    """
    own = {name: x for name, x in os.environ.items() if not name.startswith(("PYTHON", "WEFT_"))}
    ended = subprocess.run(
        command,
        cwd=folder,
        env={**own, **variables},
        capture_output=True,
        text=True,
        timeout=seconds,
    )
    if check and ended.returncode:
        told = f"{ended.stdout}{ended.stderr}".strip()
        raise RuntimeError(f"{' '.join(command)}: {told[-600:]}")
    return ended.stdout


def page(rows: dict[tuple[str, str], str], stamp: Stamp, head: str = HEAD) -> str:
    """The text of docs/matrix.md, or of a page with another head."""
    lines = (f"| {python} | {torch} | {told} |" for (python, torch), told in sorted(rows.items()))
    bare = ", ".join(f"`tests/{folder}`" for folder in FREE)
    return head.format(stamp=stamp, bare=bare) + "\n".join(lines) + "\n"


def rows_of(text: str) -> dict[tuple[str, str], str]:
    """The rows of an earlier page."""
    found = re.findall(r"^\| ([\d.]+) \| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return {(python, torch): told for python, torch, told in found}


def main() -> int:
    """Returns 1 when a test failed, or a pair could not be installed."""
    parser = argparse.ArgumentParser(prog="python -m tools.matrix", description=__doc__)
    parser.add_argument("--python", nargs="+", default=list(PYTHONS))
    parser.add_argument("--torch", choices=("oldest", "newest"))
    parser.add_argument("--tests", nargs="+", default=[])
    chosen = parser.parse_args()
    whole = set(chosen.python) == set(PYTHONS) and not chosen.torch
    rows = {} if whole or not PAGE.exists() else rows_of(PAGE.read_text())
    stamp, well = stamp_now(COMMAND, SOURCES), True
    for cell in cells(chosen.python):
        if chosen.torch and chosen.torch not in cell.wanted:
            continue
        if chosen.tests and not cell.torch:
            print(
                f"Python {cell.python}, torch {cell.name}: pip finds none for CPUs, nothing is run"
            )
            continue
        try:
            told = tested(cell, chosen.tests)
        except (RuntimeError, subprocess.SubprocessError) as error:
            told = f"not run: {str(error).strip().splitlines()[-1]}"
        print(f"Python {cell.python}, torch {cell.name}: {told}", flush=True)
        well &= not re.search(r"failed|error|not run", told)
        if not chosen.tests:
            rows[cell.python, cell.name] = " ".join(told.split()).replace("|", "\\|")
            PAGE.write_text(page(rows, stamp))
    return int(not well)


if __name__ == "__main__":
    sys.exit(main())
