"""Each rule of the house fires on a small tree; what stood there before may only shrink."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from tools import house
from tools.house import MOST, House, complaints, tightened

ROOT = Path(__file__).parents[2]
LAYERS = '[[tool.importlinter.contracts]]\nlayers = [\n    "top",\n    "middle | other",\n    "low",\n]\n'
LIMITS: Mapping[str, Any] = {"lines": 1000, "once": 50.0, "one_line": 1, "small": [], "twice": {}}
LONG = "x = 1\n" * 70


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A tree in order: a module in each of four packages, in three layers."""
    write(tmp_path / "pyproject.toml", LAYERS)
    for package in ("top", "middle", "other", "low"):
        write(tmp_path / f"src/weft/{package}/__init__.py", "")
        write(tmp_path / f"src/weft/{package}/{package}_work.py", LONG)
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def found(tree: Path, **limits: Any) -> list[str]:
    return list(complaints(House.at(tree), {**LIMITS, **limits}))


def test_a_tree_in_order_passes(tree: Path) -> None:
    assert found(tree) == []


def test_a_small_module_is_refused_until_three_import_it(tree: Path) -> None:
    write(tree / "src/weft/low/part.py", "x = 1\n")
    (told,) = found(tree)
    assert "src/weft/low/part.py has 1 lines, and 0 modules import it" in told
    assert found(tree, small=["low/part.py"]) == []
    for package, line in (
        ("top", "import weft.low.part\n"),
        ("middle", "from weft.low import part\n"),
        ("other", "from weft.low.part import x\n"),
    ):
        write(tree / f"src/weft/{package}/{package}_work.py", line + LONG)
    assert found(tree) == []
    (told,) = found(tree, small=["low/part.py"])
    assert "low/part.py are as they should be: take them out" in told


@pytest.mark.parametrize("package", ["middle/inner", "other", "low", "top"])
def test_a_file_name_stands_once_among_neighbours(tree: Path, package: str) -> None:
    write(tree / f"src/weft/{package}/middle_work.py", LONG)
    (told,) = found(tree)
    assert "middle_work.py stands 2 times among neighbours" in told
    both = ["middle/middle_work.py", f"{package}/middle_work.py"]
    assert found(tree, twice={"middle_work.py": both}) == []
    assert found(tree, twice={"middle_work.py": both[:1]})


def test_packages_that_are_no_neighbours_may_have_files_of_one_name(tree: Path) -> None:
    write(tree / "src/weft/low/top_work.py", LONG)
    assert found(tree) == []


HELPERS = """
def work(x):
    return _one(x) + _two(x) + _two(x) + _long(x)


def _one(x):
    \"\"\"Doubled.\"\"\"
    return 2 * x


def _two(x):
    return 3 * x


def _long(x):
    y = x + 1
    return y * y
"""


def test_helpers_that_one_place_calls_may_not_become_more(tree: Path) -> None:
    write(tree / "src/weft/low/low_work.py", HELPERS + LONG)
    assert House.at(tree).modules["low/low_work.py"].once == ("_one", "_long")
    assert House.at(tree).one_line == 1
    assert found(tree) == []
    (told,) = found(tree, once=49.0)
    assert "50.0 % of all functions are helpers that one place calls" in told
    (told,) = found(tree, one_line=0)
    assert "1 helpers of one line are called by one place, no more than 0" in told


def test_lines_may_not_become_more(tree: Path) -> None:
    assert found(tree, lines=280) == []
    (told,) = found(tree, lines=279)
    assert "280 lines in src/weft, no more than 279 are allowed" in told


def test_limits_are_tightened_and_never_widened(tree: Path) -> None:
    write(tree / "src/weft/low/part.py", "x = 1\n")
    write(tree / "src/weft/low/middle_work.py", LONG)
    both = ["low/middle_work.py", "middle/middle_work.py"]
    given = {
        **LIMITS,
        "small": ["low/gone.py"],
        "twice": {"middle_work.py": [*both, "top/middle_work.py"], "gone.py": ["low/gone.py"]},
    }
    now = tightened(House.at(tree), given)
    assert now == {
        "lines": 400,
        "once": 0.0,
        "one_line": 0,
        "small": [],
        "twice": {"middle_work.py": both},
    }
    assert tightened(House.at(tree), {**now, "lines": 10})["lines"] == 10


def test_the_command_names_large_modules_and_fails_on_others(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(tree / "src/weft/low/large.py", "x = 1\n" * (MOST + 1))
    write(tree / "tools/house.yaml", "# Kept.\n" + yaml.safe_dump({**LIMITS, "lines": 5000}))
    monkeypatch.chdir(tree)
    monkeypatch.setattr("sys.argv", ["house"])
    assert house.main() == 0
    assert f"src/weft/low/large.py has {MOST + 1} lines" in capsys.readouterr().out
    write(tree / "src/weft/low/part.py", "x = 1\n")
    assert house.main() == 1
    monkeypatch.setattr("sys.argv", ["house", "--tighten"])
    house.main()
    assert (tree / "tools/house.yaml").read_text().startswith("# Kept.\nlines: 800\n")


def test_the_layers_are_those_of_the_project() -> None:
    layers = house.layers((ROOT / "pyproject.toml").read_text())
    assert layers[0] == ("cli",)
    assert ("tensor", "planning") in layers
    packages = {path.parent.name for path in (ROOT / "src/weft").glob("*/__init__.py")}
    assert packages <= {name for names in layers for name in names}
