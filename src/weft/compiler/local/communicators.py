"""The groups of ranks that talk to each other: one communicator for each group, numbered alike on every rank."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from weft.boxing.box_steps import step_groups
from weft.compiler.halos import graph_halos, tensor_steps
from weft.ir.logical import LogicalGraph
from weft.ir.plan import Communicator


def communicators(graph: LogicalGraph) -> tuple[Communicator, ...]:
    """The communicators that the boxings of a graph need, in the order of their first use.

    The ranks that send stand before those that receive, so that between two stages without common
    ranks forward and backward have communicators of their own and do not wait for each other.
    """
    every = dict.fromkeys(ranks for groups in _groups_at_once(graph) for ranks in groups)
    return tuple([Communicator(number, ranks) for number, ranks in enumerate(every)])


def families(
    graph: LogicalGraph, communicators: Sequence[Communicator]
) -> Mapping[int, tuple[int, ...]]:
    """For each communicator, by id, those that run the same exchange at the same time, itself among them.

    They are the groups of one step of boxing, which share the links between the ranks. A communicator with which
    several steps have different company is given the largest.

    Args:
        graph: with layouts on all values.
        communicators: of all its boxings.
    """
    ids = {each.ranks: each.id for each in communicators}
    found: dict[int, tuple[int, ...]] = {}
    for groups in _groups_at_once(graph):
        family = tuple([ids[ranks] for ranks in groups])
        for id in family:
            if len(found.get(id, ())) < len(family):
                found[id] = family
    return found


def _groups_at_once(graph: LogicalGraph) -> Iterator[Sequence[tuple[int, ...]]]:
    """The groups of each step of boxing, and of each exchange of border rows; of steps on the same groups once."""
    seen = set()
    for step, _, _ in tensor_steps(graph):
        where = step.source.placement, step.target.placement, step.axis
        groups = () if where in seen else step_groups(step)
        if groups:
            seen.add(where)
            yield groups
    for halo, _ in graph_halos(graph):
        yield halo.groups
