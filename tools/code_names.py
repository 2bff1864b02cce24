"""The names that the code has, for pages that speak of them: words of all folders, and members of the classes of `src`.

Of `src` count identifiers, and words in strings of one line, as options and names of ops are; not docstrings nor
comments, which may be as old as the page. Of other folders every word counts.
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from itertools import pairwise, starmap
from pathlib import Path

SOURCE = "src"
OTHERS = ("tests", "tools", "benchmarks", "examples")


class CodeNames:
    """The names of the tree at `root`."""

    def __init__(self, root: Path) -> None:
        self._words: set[str] = set()
        self._members: dict[str, set[str]] = defaultdict(set)
        self._bases: dict[str, set[str]] = defaultdict(set)
        for path in (root / SOURCE).rglob("*.py"):
            self._words.update(path.relative_to(root).with_suffix("").parts)
            tree = ast.parse(path.read_text())
            self._words.update(_names(tree))
            for node in ast.walk(tree):
                if isinstance(node, ast.ClassDef):
                    self._members[node.name].update(_names(node))
                    self._bases[node.name].update(map(_bare, node.bases))
        for path in (each for folder in OTHERS for each in (root / folder).rglob("*.py")):
            self._words.update(path.relative_to(root).with_suffix("").parts)
            self._words.update(re.findall(r"\w+", path.read_text()))

    def has(self, name: str) -> bool:
        """True where every part of a dotted name is there; of `Class.member`, in the class or a base of it."""
        parts = name.split(".")
        return self._words.issuperset(parts) and all(starmap(self._has_member, pairwise(parts)))

    def _has_member(self, owner: str, member: str) -> bool:
        """False where `owner` is a class of `src` without this member, and so are all its bases."""
        if owner not in self._members:
            return True  # a module, a value, or a class of a library
        if member in self._members[owner]:
            return True
        return any(self._has_member(base, member) for base in self._bases[owner] - _BARE)


# Bases without members of which a page would speak.
_BARE = frozenset({"ABC", "Generic", "NamedTuple", "Protocol"})


def _bare(base: ast.expr) -> str:
    """The name of a class without its package and type arguments."""
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def _names(tree: ast.AST) -> Iterator[str]:
    """The identifiers in a tree, and the words in its strings of one line that are no docstrings."""
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name):
                yield name
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                yield name
            case ast.keyword(arg=str(name)):
                yield name
            case ast.alias(name=name, asname=other):
                yield from (*name.split("."), *([other] if other else []))
            case ast.Constant(value=str(text)) if "\n" not in text and id(node) not in docstrings:
                yield from re.findall(r"\w+", text)
