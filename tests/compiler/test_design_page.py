"""docs/design.md: its picture has the passes of the pipeline, in the order in which they run."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PIPELINE = ast.parse((ROOT / "src/weft/compiler/pipeline.py").read_text())
PICTURE = (ROOT / "docs/design.md").read_text().split("```")[1]
PASSES = {
    name.name
    for node in PIPELINE.body
    if isinstance(node, ast.ImportFrom) and str(node.module).startswith("weft.compiler.")
    for name in node.names
    if name.name.islower()
}


@pytest.mark.parametrize("part", ["transform", "lay", "lower"])
def test_the_picture_has_the_passes_as_they_run(part: str) -> None:
    (function,) = (n for n in PIPELINE.body if isinstance(n, ast.FunctionDef) and n.name == part)
    run = list(dict.fromkeys(name for name in calls(function) if name in PASSES))
    (drawn,) = re.findall(rf"│ {part} (.*?)(?=\n   ▼|\n   │ \w)", PICTURE, re.DOTALL)
    assert [word for word in re.findall(r"\w+", drawn) if word in PASSES] == run


def calls(node: ast.AST) -> Iterator[str]:
    """The names of functions that are called below a node: arguments first, as they run."""
    for child in ast.iter_child_nodes(node):
        yield from calls(child)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        yield from (arg.id for arg in node.args if isinstance(arg, ast.Name))  # what it calls
        yield node.func.id
