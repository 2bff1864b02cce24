"""Scripts with other libraries: few lines change."""

from __future__ import annotations

import ast
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest

from recipes.checks.with_frameworks import MOST, accelerate, huggingface, lightning, pair, written
from recipes.harness import RECIPES, Work, is_installed

FOLDERS = sorted(path.parent.name for path in RECIPES.glob("*/after.py"))


def test_every_pair_is_there() -> None:
    assert FOLDERS == ["accelerate_loop", "huggingface", "lightning_module"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_at_most_three_lines_are_written(folder: str) -> None:
    before, after = pair(folder)
    assert 0 < len(written(before, after)) <= MOST
    for text in (before, after):
        assert ast.get_docstring(ast.parse(text))
    assert "weft" not in before
    assert "weft" in after


def test_lines_that_are_written_are_counted() -> None:
    before = '"""Before."""\nimport a\n\nx = 1\ny = 2\n'
    after = '"""After."""\nimport a\nimport b\n\n\nx = 1\ny = 3\n'
    assert written(before, after) == ["import b", "y = 3"]


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ("torch", True),
        (f"torch=={metadata.version('torch')}", True),
        (f"torch[extra]=={metadata.version('torch')}", True),
        ("torch==0.1", False),
        ("no-package-of-this-name", False),
    ],
)
def test_packages_are_looked_up(given: str, found: bool) -> None:
    assert is_installed(given) == found


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("recipe", "packages"),
    [(huggingface, "huggingface"), (accelerate, "huggingface"), (lightning, "lightning")],
)
def test_scripts_show_the_same_losses(
    recipe: Callable[[Work], str], packages: str, tmp_path: Path
) -> None:
    """Before in one process, after on two ranks; skipped without the library."""
    wanted = (RECIPES / "packages" / f"{packages}.txt").read_text().split()
    missing = [each for each in wanted if not is_installed(each)]
    if missing:
        pytest.skip(f"needs {' and '.join(missing)}")
    assert "lines changed" in recipe(Work(tmp_path, install=False))
