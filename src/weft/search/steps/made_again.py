"""The calls that the backward makes again where all blocks are recomputed, read off a plan without recomputation."""

from __future__ import annotations

from weft.compiler.training.regions import kept_values, regions
from weft.ir.logical import Call, LogicalGraph, node_outputs, node_uses
from weft.search.steps.repeated import Blocks


def made_again(graph: LogicalGraph, blocks: Blocks) -> frozenset[str]:
    """The names of values in blocks that the backward reads, and of what these are made of, as far as none is kept.

    A block keeps what it hands on: its last product need not run again where nothing else of the backward reads it.
    """
    region_of = regions(graph, (f"{blocks.prefix}.*",))
    inside = region_of.keys() - kept_values(graph, region_of)
    found = set[str]()
    for node in reversed(graph.nodes):
        if isinstance(node, Call):
            made = (value.name for value in node_outputs(node))
            if node.phase.kind != "forward" or not found.isdisjoint(made):
                found |= inside.intersection(node_uses(node))
    return frozenset(found)
