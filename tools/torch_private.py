"""Private names of torch that weft uses: found in its source, each with what it is for and a probe of what it does.

`python -m tools.torch_private` writes docs/private_apis.md and says which probes fail: with a new torch, what broke.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import final

import torch

from tools.torch_probes import PROBES

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "private_apis.md"
# Private names of objects that are Python's.
PYTHON = frozenset(
    ("_SimpleCData", "_exit", "_fields", "_getframe", "_on_queue_feeder_error", "_replace")
)
# Private modules: what is used is what lies in them.
MODULES = frozenset(
    ("_C", "_decomp", "_dynamo", "_foreach_utils", "_inductor", "_lazy_graph_module", "_ops")
    + ("_python_dispatch", "_pytree", "_subclasses", "_symbolic_trace", "_triton")
)
_PATH = re.compile(r"torch(\.\w+)+")
HEAD = """# Private names of torch

The private names of torch that weft uses, and for what.

Written by `python -m tools.torch_private`, which also says which names no longer do what weft needs. A test
checks each name, and that weft uses no others. A name that begins with a dot is a member of some object.

| for | names |
|---|---|
"""


@final
@dataclass(frozen=True)
class Use:
    """A private name that a module of weft uses."""

    name: str
    module: str


@cache
def own_uses() -> tuple[Use, ...]:
    """Those of weft."""
    return tuple(uses(ROOT / "src" / "weft"))


def uses(source: Path) -> Iterator[Use]:
    """The private names of torch in the modules below a folder.

    By path, as `torch._C._swap_tensor_impl`, where a module gets at it from `torch`, also by a name in quotes behind
    the object, as `(nn.Module, "_apply")`; as `.name` where it is a member of some object and weft has none of that
    name.
    """
    trees = {path: ast.parse(path.read_text()) for path in sorted(source.rglob("*.py"))}
    own = {name for tree in trees.values() for name in _defined(tree)} | PYTHON
    for path, tree in trees.items():
        module = str(path.relative_to(source))
        imported = dict(_imported(tree))
        paths = {name for name in imported.values() if _is_private(name)}
        members = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and _PATH.fullmatch(str(node.value)):
                paths.add(str(node.value))  # of what is imported when it is needed
            if isinstance(node, ast.Tuple | ast.Call):
                pairs = pairwise(node.elts if isinstance(node, ast.Tuple) else node.args)
                paths |= {found for pair in pairs if (found := _named(*pair, imported))}
            if not isinstance(node, ast.Attribute):
                continue
            root, *rest = _dotted(node)
            if root in imported:
                paths.add(".".join((imported[root], *rest)))
            elif node.attr not in own and _is_private(node.attr) and root not in ("self", "cls"):
                members.add(f".{node.attr}")
        for name in (*_ends(map(_cut, filter(_is_private, paths))), *members):
            yield Use(name, module)


def _named(owner: ast.expr, name: ast.expr, imported: Mapping[str, str]) -> str:
    """The path of the member of an object of torch that a name in quotes stands for; "" for any other pair."""
    root, *rest = _dotted(owner)
    match name:
        case ast.Constant(value=str(member)) if root in imported and member.isidentifier():
            return ".".join((imported[root], *rest, member))
    return ""


def _is_private(path: str) -> bool:
    return any(part.startswith("_") and not part.startswith("__") for part in path.split("."))


def _cut(path: str) -> str:
    """A path up to its last private name; all of it where that is a module, or torch's namespace of C++ names."""
    parts = path.split(".")
    last = max(i for i, part in enumerate(parts) if _is_private(part))
    return path if parts[last] in MODULES else ".".join(parts[: last + 1])


def _ends(paths: Iterable[str]) -> Iterator[str]:
    """Paths that are not the begin of another."""
    every = set(paths)
    return (path for path in every if not any(other.startswith(f"{path}.") for other in every))


def _imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """Names of torch in a module, with their paths."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            for alias in node.names:
                yield alias.asname or alias.name, f"{node.module}.{alias.name}"
        elif isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    yield alias.asname or "torch", alias.name if alias.asname else "torch"


def _dotted(node: ast.expr) -> tuple[str, ...]:
    """The names of `a.b.c`; "" stands for a root that is no name."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return (node.id if isinstance(node, ast.Name) else "", *reversed(names))


def _defined(tree: ast.AST) -> Iterator[str]:
    """Private names that a module gives to something: functions, classes, fields, attributes, variables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and _dotted(node)[0] in ("self", "cls"):
            yield node.attr


def broken() -> Iterator[str]:
    """Names whose probe fails with the torch that is installed, a line each."""
    for name in PROBES:
        fault = fault_of(name)
        if fault:
            yield f"{name}, for {PROBES[name].reason}: {fault}"


def fault_of(name: str) -> str:
    """What is wrong with a name in this torch; "" where it does what weft needs."""
    try:
        return "" if PROBES[name].holds() else "does something else"
    except Exception as error:  # whatever torch says instead
        return f"{type(error).__name__}: {error}"


def page() -> str:
    """The text of the page."""
    names: dict[str, list[str]] = defaultdict(list)
    for name in sorted({use.name for use in own_uses()}):
        names[PROBES[name].reason].append(f"`{name}`")
    rows = (f"| {reason} | {' '.join(names[reason])} |" for reason in sorted(names))
    return HEAD + "\n".join(rows) + "\n"


def main() -> int:
    """Write the page; returns 1 when a probe fails."""
    PAGE.write_text(page())
    found = list(broken())
    print("\n".join([f"torch {torch.__version__}", *found]))
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
