"""The groups of ranks that talk to each other: one communicator for each group, numbered alike on every rank."""

from __future__ import annotations

from weft.boxing import steps
from weft.boxing.box_steps import step_groups
from weft.compiler.halos import graph_halos
from weft.ir.logical import Box, LogicalGraph
from weft.ir.plan import Communicator
from weft.units import ITEM_SIZE


def communicators(graph: LogicalGraph) -> tuple[Communicator, ...]:
    """The communicators that the boxings of a graph need, in the order of their first use.

    The ranks that send stand before those that receive, so that between two stages without common
    ranks forward and backward have communicators of their own and do not wait for each other.
    """
    found: dict[tuple[int, ...], Communicator] = {}
    boxings = [(graph.values[node.input.name], node.output.layout) for node in graph.of_kind(Box)]
    # Of equal boxings, such as those of repeated layers, once.
    for before, after, shape, dtype in dict.fromkeys(
        (value.layout, after, value.shape, value.dtype) for value, after in boxings
    ):
        for step in steps(before, after, shape, ITEM_SIZE[dtype]):
            for ranks in step_groups(step):
                found.setdefault(ranks, Communicator(len(found), ranks))
    for halo, _ in graph_halos(graph):
        for ranks in halo.groups:
            found.setdefault(ranks, Communicator(len(found), ranks))
    return tuple(found.values())
