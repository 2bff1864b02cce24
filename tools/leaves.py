"""Classes that nothing derives from say so: `python -m tools.leaves` lists those of `src/weft` without `@final`.

A class is open where a class of the repository names it as a base, by its bare name; protocols and classes with
abstract methods are open as well, and so is every error of `weft.errors`, which users may derive from.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path("src/weft")
FOLDERS = ("src", "tests", "tools", "benchmarks", "examples")

# Modules whose classes users may derive from.
OPEN = (SOURCE / "errors.py",)


def open_leaves(root: Path) -> Iterator[str]:
    """A sentence for each class of the tree at `root` that is to be final."""
    based = {name for folder in FOLDERS for name in _bases(root / folder)}
    for path in sorted((root / SOURCE).rglob("*.py")):
        place = path.relative_to(root)
        if place in OPEN:
            continue
        for node in _classes(path):
            if node.name not in based and not _is_closed(node) and not _is_abstract(node):
                yield f"{place}:{node.lineno}: nothing derives from {node.name}: mark it @final"


def _classes(path: Path) -> Iterator[ast.ClassDef]:
    tree = ast.parse(path.read_text())
    return (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def _bases(folder: Path) -> Iterator[str]:
    for path in folder.rglob("*.py"):
        for node in _classes(path):
            yield from map(_bare, node.bases)


def _bare(base: ast.expr) -> str:
    """The name of a class without its package and type arguments: of `nn.Module`, `Module`."""
    return ast.unparse(base).partition("[")[0].rpartition(".")[2]


def _is_closed(node: ast.ClassDef) -> bool:
    return any(_bare(each) == "final" for each in node.decorator_list)


def _is_abstract(node: ast.ClassDef) -> bool:
    """True of a protocol, and of a class with an abstract method."""
    methods = (each for each in node.body if isinstance(each, ast.FunctionDef))
    marks = (_bare(mark) for method in methods for mark in method.decorator_list)
    return "Protocol" in map(_bare, node.bases) or "abstractmethod" in marks


def main() -> int:
    """Print what is to be final; returns the exit code."""
    found = list(open_leaves(Path.cwd()))
    print("\n".join(found))
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
