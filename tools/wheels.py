"""The wheel in fresh environments: `make wheels` (`python -m tools.wheels`) writes docs/wheels.md.

python -m tools.wheels                              every pair of Python and torch (minutes)
python -m tools.wheels --python 3.12                of one Python; the other rows of the page stay

The source archive of the tree is built, the wheel from it, and both are compared with what git has. For each pair that
`tools.matrix` finds, pip installs the wheel by constraints.txt into a virtual environment below runs/wheels, where
`tools/outside.py` runs in an empty folder. Where there is no torch for CPUs, the wheel is installed with all else that
it needs, and what needs no torch must run.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

from tools.matrix import INSTALL, PYTHONS, Cell, cells, environment, page, rows_of, said
from tools.scores.stamp import stamp_now

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "wheels.md"
VENVS = ROOT / "runs" / "wheels"
COMMAND = "make wheels"
SOURCES = ("src/weft", "tools/outside.py")
# Seconds that all but installing may take.
RUN = 300
OWN = {"PYTHONPATH": str(ROOT / "src")}
HEAD = """# The wheel

The fresh environments in which the wheel of weft has run, outside of the repository.

{stamp}

The wheel is built from the source archive, installed by pip with what it needs, and used in an empty folder: the first
block of the [README](../README.md), `weft doctor`, a simulation with its report. *none*: pip found no such torch for
CPUs on that machine, so the wheel was installed with all else, and what needs no torch has run. [Versions](matrix.md)
says which tests have run where.

| Python | torch | seen |
|---|---|---|
"""


def built(folder: Path) -> tuple[Path, Path]:
    """Build the source archive of the tree, and the wheel from it, in a folder."""
    build = (sys.executable, "-m", "hatchling", "build", "-d", str(folder), "-t")
    said([*build, "sdist"], RUN, variables=OWN)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder / "source", filter="data")
    said([*build, "wheel"], RUN, folder / "source" / archive.name.removesuffix(".tar.gz"))
    (wheel,) = folder.glob("*.whl")
    return archive, wheel


def faults(archive: Path, wheel: Path) -> Iterator[str]:
    """A sentence for each file that git has of the package and one of both lacks, or that is too much."""
    tracked = said(["git", "ls-files", "src/weft"], RUN).split()
    wanted = {name.removeprefix("src/") for name in tracked}
    with zipfile.ZipFile(wheel) as opened:
        names = set(opened.namelist())
    (record,) = (name for name in names if name.endswith(".dist-info/RECORD"))
    folder = record.rpartition("/")[0]
    wanted |= {
        f"{folder}/{name}"
        for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")
    }
    yield from (f"the wheel lacks {name}" for name in sorted(wanted - names))
    yield from (f"the wheel has {name}, which git has not" for name in sorted(names - wanted))
    with tarfile.open(archive) as packed:
        there = {name.partition("/")[2] for name in packed.getnames()}
    needed = {*tracked, "README.md", "LICENSE", "CHANGELOG.md", "pyproject.toml", "PKG-INFO"}
    yield from (f"the source archive lacks {name}" for name in sorted(needed - there))


def installed(cell: Cell, wheel: Path) -> Path:
    """The Python of a new virtual environment with the wheel and what it needs.

    Raises:
        RuntimeError: when pip cannot install it.
    """
    python, pip = environment(cell, VENVS / cell.folder)
    if cell.torch:
        said([*pip, str(wheel)], INSTALL)
    else:
        said([*pip, *needed_but_torch(wheel)], INSTALL)
        said([*pip, "--no-deps", str(wheel)], INSTALL)
    return python


def needed_but_torch(wheel: Path) -> list[str]:
    """What the package needs, without torch."""
    with zipfile.ZipFile(wheel) as opened:
        (name,) = (each for each in opened.namelist() if each.endswith(".dist-info/METADATA"))
        text = opened.read(name).decode()
    needed = re.findall(r"^Requires-Dist: ([^;\n]+)$", text, re.MULTILINE)
    return [each for each in needed if not each.startswith("torch")]


def write_graph(path: Path) -> None:
    """A graph file of a small step, by the torch of this Python."""
    lines = (
        "import sys, torch, weft",
        "model = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 4))",
        "optimizer = torch.optim.AdamW(model.parameters())",
        "job = weft.Job(model, lambda net, x: net(x).square().mean(), optimizer, torch.ones(32, 16))",
        "job.stored().save(sys.argv[1])",
    )
    said([sys.executable, "-c", "\n".join(lines), str(path)], RUN, variables=OWN)


def used(python: Path, graph: Path | None = None) -> str:
    """What `tools/outside.py` says in an environment, in an empty folder.

    Args:
        python: of the environment.
        graph: a graph file, where there is no torch to make one.

    Raises:
        RuntimeError: when it fails.
    """
    with tempfile.TemporaryDirectory() as empty:
        command = [str(python), str(ROOT / "tools" / "outside.py"), str(ROOT / "README.md")]
        lines = said([*command, *([] if graph is None else [str(graph)])], RUN, Path(empty))
    return ", ".join(lines.splitlines())


def seen(cell: Cell, wheel: Path, graph: Path) -> str:
    """What was seen of a pair, or why it failed."""
    try:
        return used(installed(cell, wheel), None if cell.torch else graph)
    except (RuntimeError, subprocess.SubprocessError) as error:
        return f"failed: {str(error).strip().splitlines()[-1]}"


def main() -> int:
    """Returns 1 when the wheel lacks something, or did not run somewhere."""
    parser = argparse.ArgumentParser(prog="python -m tools.wheels", description=__doc__)
    parser.add_argument("--python", nargs="+", default=list(PYTHONS))
    chosen = parser.parse_args()
    whole = set(chosen.python) == set(PYTHONS)
    rows = {} if whole or not PAGE.exists() else rows_of(PAGE.read_text())
    with tempfile.TemporaryDirectory() as kept:
        graph = Path(kept, "step.graph")
        archive, wheel = built(Path(kept))
        wrong = list(faults(archive, wheel))
        print("\n".join(wrong), end="\n" if wrong else "")
        write_graph(graph)
        found = list(cells(chosen.python))
        for version in set(chosen.python) - {cell.python for cell in found}:
            rows[version, "not tried"] = "the machine had no such Python"
        for cell in found:
            told = seen(cell, wheel, graph)
            print(f"Python {cell.python}, torch {cell.name}: {told}", flush=True)
            rows[cell.python, cell.name] = re.sub(r"\s+", " ", told).replace("|", "\\|")
    PAGE.write_text(page(rows, stamp_now(COMMAND, SOURCES), HEAD))
    return int(bool(wrong) or any(told.startswith("failed") for told in rows.values()))


if __name__ == "__main__":
    sys.exit(main())
