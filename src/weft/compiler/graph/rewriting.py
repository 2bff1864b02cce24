"""Small rewrites of graphs, and what all rewrites ask of a call: the name that it reads, and its one result."""

from __future__ import annotations

from collections.abc import Mapping

from weft.ir import renamed as nodes
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value, node_uses


def renamed(graph: LogicalGraph, names: Mapping[str, str]) -> LogicalGraph:
    """The graph with other values in place of some; these may be replaced themselves."""
    if not names:
        return graph

    def final(name: str) -> str:
        while name in names:
            name = names[name]
        return name

    last = {name: final(name) for name in names}
    return graph.with_nodes(nodes.renamed(node, last) for node in graph.nodes)


def needed(graph: LogicalGraph) -> LogicalGraph:
    """The graph without calls whose results nobody reads."""
    used: set[str] = set()
    kept: list[Node] = []
    for node in reversed(graph.nodes):
        made = [value.name for value in node.outputs if value] if isinstance(node, Call) else []
        if not isinstance(node, Call) or any(name in used for name in made):
            used.update(node_uses(node))
            kept.append(node)
    return graph.with_nodes(reversed(kept))


def ref_name(arg: Arg) -> str:
    """The name of the value that an argument is, where its op takes nothing but a tensor there."""
    assert isinstance(arg, Ref)
    return arg.name


def only_result(call: Call) -> Value:
    """The result of a call whose op has one, which is a tensor."""
    (value,) = call.outputs
    assert value is not None
    return value
