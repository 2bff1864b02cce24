"""Scripts with other libraries: few lines change."""

from __future__ import annotations

import ast

import pytest

from recipes.checks.with_frameworks import MOST, pair, written
from recipes.harness import RECIPES

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
