"""The wheel has all files of the package, and runs where the repository is not."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

from tools.matrix import Cell, page, rows_of
from tools.scores.stamp import stamp_now
from tools.wheels import HEAD, ROOT, built, faults, needed_but_torch, used

pytest.importorskip("hatchling", reason="there is no hatchling: pip install -e '.[test]'")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The source archive and the wheel."""
    return built(tmp_path_factory.mktemp("built"))


def test_both_have_all_that_git_has(files: tuple[Path, Path], tmp_path: Path) -> None:
    archive, wheel = files
    assert list(faults(archive, wheel)) == []
    other = tmp_path / wheel.name
    shutil.copy(wheel, other)
    with zipfile.ZipFile(other, "a") as opened:
        opened.writestr("weft/kept.txt", "")
    assert list(faults(archive, other)) == ["the wheel has weft/kept.txt, which git has not"]


@pytest.mark.slow
def test_it_runs_outside_of_the_repository(files: tuple[Path, Path], tmp_path: Path) -> None:
    """In a fresh environment, with the packages of this one but for weft."""
    folder = tmp_path / "fresh"
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet"]
    alone = ["--no-deps", "--no-index", "--no-compile", "--disable-pip-version-check"]
    subprocess.run([*pip, *alone, str(files[1])], check=True, timeout=120)
    (site,) = folder.glob("lib/python3*/site-packages")
    seen = [each for each in sys.path if each.endswith(("site-packages", "dist-packages"))]
    (site / "seen.pth").write_text("\n".join(seen))
    told = re.sub(r"weft [\d.]+", "weft", used(python))
    assert told == ("weft, the first block of the README, weft doctor, a simulation and its report")


def test_what_is_needed_but_torch(files: tuple[Path, Path]) -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^dependencies = \[\n(.*?)\]", text, re.MULTILINE | re.DOTALL)
    wanted = {name for name in re.findall(r'"(\w+)', listed) if name != "torch"}
    assert {re.split(r"\W", each)[0] for each in needed_but_torch(files[1])} == wanted


def test_rows_survive_a_page() -> None:
    rows = {("3.10", Cell("3.10", "", "", "oldest").name): "weft 1.0", ("3.11", "x"): "failed: y"}
    assert rows_of(page(rows, stamp_now("make wheels", ["tools/wheels.py"]), HEAD)) == rows
    assert (ROOT / "docs" / "wheels.md").is_file()
