"""Layouts of activations: a hint on what modules return, where the strategy names them.

Before: calls outside of a module read what it made. After: they read it through `weft.hint`.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from typing import TypeAlias

from weft.compiler.box import renamed
from weft.errors import StrategyError
from weft.ir.logical import Call, LogicalGraph, Node, Ref, Value, node_outputs

# Patterns of module paths, and the SBPs of what they return, as texts of hints.
Layouts: TypeAlias = Sequence[tuple[str, str]]


def lay_activations(
    graph: LogicalGraph, layouts: Layouts, modules: Sequence[str] = ()
) -> LogicalGraph:
    """Hint at what modules return that a pattern names; the first that does counts.

    What a module returns is what it makes and other calls of the forward read.

    Args:
        graph: without layouts.
        layouts: patterns, and what they ask for.
        modules: that a pattern may name, besides those with a call.

    Raises:
        StrategyError: when a pattern names no module.
    """
    if not layouts:
        return graph
    _check(graph, layouts, modules)
    hinted: dict[str, tuple[str, str]] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        names = {old: new for old, (new, path) in hinted.items() if not _inside(node, path)}
        nodes.append(renamed(node, names))
        if isinstance(node, Call) and node.phase.kind == "forward":
            for name, path, text in _returned(graph, node, layouts):
                hint = _hint(node, graph.values[name], text)
                nodes.append(hint)
                hinted[name] = node_outputs(hint)[0].name, path
    return replace(graph, nodes=tuple(nodes))


def _hint(maker: Call, value: Value, text: str) -> Call:
    laid = replace(value, name=f"{value.name}.laid")
    return Call("weft.hint", (Ref(value.name), text), (), (laid,), maker.location, maker.phase)


def _returned(graph: LogicalGraph, node: Call, layouts: Layouts) -> Iterator[tuple[str, str, str]]:
    """What a call makes that a module returns: name, outermost such module, and the text for it."""
    for value in node_outputs(node):
        for path in _around(node):
            text = next((text for pattern, text in layouts if fnmatchcase(path, pattern)), None)
            readers = graph.users[value.name]
            if text is not None and any(_outside(reader, path) for reader in readers):
                yield value.name, path, text
                break


def _outside(node: Node, path: str) -> bool:
    """Whether a node is a call of the forward outside of a module."""
    return isinstance(node, Call) and node.phase.kind == "forward" and not _inside(node, path)


def _inside(node: Node, path: str) -> bool:
    """Whether a node belongs to the forward of a module."""
    return isinstance(node, Call) and node.phase.kind == "forward" and path in _around(node)


def _around(node: Call) -> Iterator[str]:
    """The paths of the modules around a call, outermost first."""
    parts = node.location.module.split(".") if node.location and node.location.module else []
    return (".".join(parts[: count + 1]) for count in range(len(parts)))


def _check(graph: LogicalGraph, layouts: Layouts, modules: Sequence[str]) -> None:
    paths = {path for call in graph.of_kind(Call) for path in _around(call)} | set(modules)
    for pattern, _ in layouts:
        if not any(fnmatchcase(path, pattern) for path in paths):
            near = difflib.get_close_matches(pattern, paths, n=3, cutoff=0.4)
            raise StrategyError(
                f"activations={{{pattern!r}: …}} names no module; modules that exist: "
                f"{', '.join(near or sorted(paths)[:5])}"
            )
