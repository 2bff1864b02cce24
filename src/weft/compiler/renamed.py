"""A graph in which some values are other ones of the same graph."""

from __future__ import annotations

from collections.abc import Mapping

from weft.compiler import box
from weft.ir.logical import LogicalGraph


def renamed(graph: LogicalGraph, names: Mapping[str, str]) -> LogicalGraph:
    """The graph with other values in place of some; these may be replaced themselves."""
    if not names:
        return graph

    def final(name: str) -> str:
        while name in names:
            name = names[name]
        return name

    last = {name: final(name) for name in names}
    return graph.with_nodes(box.renamed(node, last) for node in graph.nodes)
