"""Tests stand where the code stands: `python -m tools.mirror` says which folders and modules of `tests` do not.

A folder with tests is named as a package of `src/weft`, as a folder or module of `tools`, or as a folder of the root.
No test imports another test: what several use is in a module that is none. Lists of tests name what is there.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

TESTS = Path("tests")
BASES = (Path("src/weft"), Path("tools"), Path())


def faults(tests: Path) -> Iterator[str]:
    """A sentence for each fault, found from the root of the tree."""
    modules = sorted(tests.rglob("*.py"))
    tested = sorted({path.parent for path in modules if path.name.startswith("test_")} - {tests})
    for folder in tested:
        if not any(_is_there(base / folder.relative_to(tests)) for base in BASES):
            yield (
                f"{folder} has tests, but there is no {BASES[0] / folder.relative_to(tests)}: "
                "name the folder after the package that is tested"
            )
    for path in sorted(tests.glob("*.txt")):
        for line in path.read_text().splitlines():
            name = line.split()[-1].partition("::")[0]
            if not ((tests / name).exists() or Path(name).exists()):
                yield f"{path} names {name}, which is not there: name the module to which its tests went"
    for path in modules:
        for name in _imported(ast.parse(path.read_text())):
            if name.rpartition(".")[2].startswith("test_"):
                yield f"{path} imports {name}: put what both use into a module that is no test"


def _is_there(path: Path) -> bool:
    return any(path.glob("*.py")) or path.with_suffix(".py").is_file()


def _imported(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            yield node.module or ""
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)


def main() -> int:
    """Print all faults. Returns the exit code."""
    found = list(faults(TESTS))
    for fault in found:
        print(fault)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
