"""A graph without what nobody reads."""

from __future__ import annotations

from weft.ir.logical import Call, LogicalGraph, Node, node_uses


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
