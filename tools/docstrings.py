"""Docstrings name what is there; `python -m tools.words` says where they do not.

- A name that a section `Args:` documents is a parameter of that function, or of the class's constructor; one of
  `Attributes:` an attribute of that class.
- A file that a docstring or comment of the sources names, by its path or the end of it, exists.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

_SECTION = re.compile(r"^ *(Args|Attributes):\n((?: *\n| +\S.*(?:\n|\Z))*)", re.MULTILINE)
_FILE = re.compile(r"(?<![\w.*/{}<>-])((?:[\w-]+/)*\w[\w-]*\.py)\b(?![./])")
_COMMENT = re.compile(r"(?:^|\s)#(.*)$", re.MULTILINE)

# Scripts of users, in examples.
OF_USERS = frozenset({"train.py", "generate.py", "model.py", "script.py", "my_ops.py"})


def misnamed_arguments(source: Path) -> Iterator[tuple[Path, int, str]]:
    """Names that a docstring under a folder documents and its function or class has not: file, line, name."""
    for path in sorted(source.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                known = _names(node)
                documented = _documented(ast.get_docstring(node) or "")
                yield from ((path, node.lineno, name) for name in documented if name not in known)


def _documented(text: str) -> Iterator[str]:
    """Names of the sections; a continuation of a line stands deeper than its name."""
    for section in _SECTION.finditer(text):
        lines = section[2].splitlines()
        indent = min((len(x) - len(x.lstrip()) for x in lines if x.strip()), default=0)
        for line in lines:
            if not line.strip() or len(line) - len(line.lstrip()) != indent:
                continue
            names = line.partition(":")[0] if ":" in line else line
            yield from (name.strip(" *`") for name in names.split(","))


def _names(node: ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) -> set[str]:
    """Names that a function or class has: parameters, also of its methods, and attributes that it sets or declares."""
    found: set[str] = set()
    for each in ast.walk(node if isinstance(node, ast.ClassDef) else node.args):
        match each:
            case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()):
                found.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.FunctionDef(name=name):
                found.add(name)
    return found


def unknown_files(root: Path, source: Path) -> Iterator[tuple[Path, int, str]]:
    """Files that docstrings and comments under a folder name and the tree has not: file, line, name."""
    there = {
        f"/{path.relative_to(root)}"
        for folder in ("src", "tests", "tools", "benchmarks", "examples", "recipes")
        for path in (root / folder).rglob("*.py")
    }
    for path in sorted(source.rglob("*.py")):
        for line, text in _prose(path.read_text()):
            for named in _FILE.finditer(text):
                if named[1] not in OF_USERS and not any(x.endswith("/" + named[1]) for x in there):
                    yield path, line + text[: named.start()].count("\n"), named[1]


def _prose(code: str) -> Iterator[tuple[int, str]]:
    """Docstrings and comments, with the line at which each begins."""
    for node in ast.walk(ast.parse(code)):
        match node:
            case ast.Expr(value=ast.Constant(value=str(text))):
                yield node.lineno, text
    for line, text in enumerate(code.splitlines(), 1):
        if comment := _COMMENT.search(text):
            yield line, comment[1]
