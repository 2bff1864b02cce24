"""A graph in which some values are other ones of the same graph."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from weft.ir.logical import Arg, Call, LogicalGraph, Node, Output, Ref, Update


def renamed(graph: LogicalGraph, names: Mapping[str, str]) -> LogicalGraph:
    """The graph with other values in place of some."""
    if not names:
        return graph

    def final(name: str) -> str:
        while name in names:
            name = names[name]
        return name

    def arg(value: Arg) -> Arg:
        if isinstance(value, tuple):
            return tuple(arg(part) for part in value)
        return Ref(final(value.name)) if isinstance(value, Ref) else value

    def node(one: Node) -> Node:
        match one:
            case Call(args=args, kwargs=kwargs):
                named = tuple((key, arg(value)) for key, value in kwargs)
                return replace(one, args=tuple(map(arg, args)), kwargs=named)
            case Update(source=source):
                return replace(one, source=Ref(final(source.name)))
            case Output(value=value):
                return replace(one, value=Ref(final(value.name)))
        return one

    return replace(graph, nodes=tuple(map(node, graph.nodes)))
