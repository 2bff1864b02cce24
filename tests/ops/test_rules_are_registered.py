"""Every module of rules is imported by its folder: one that is not registers nothing."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from weft.ops import rules

FOLDER = Path(rules.__file__).parent
# What rules have in common registers none.
HELPERS = {"__init__", "common"}


def imported(init: Path) -> set[str]:
    """The names that a package imports of itself."""
    nodes = ast.walk(ast.parse(init.read_text()))
    return {
        alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names
    }


@pytest.mark.parametrize("init", sorted(FOLDER.rglob("__init__.py")), ids=lambda p: p.parent.name)
def test_every_module_of_rules_is_imported(init: Path) -> None:
    here = {path.stem for path in init.parent.glob("*.py")} - HELPERS
    here |= {path.parent.name for path in init.parent.glob("*/__init__.py")}
    assert here
    assert here - imported(init) == set()
