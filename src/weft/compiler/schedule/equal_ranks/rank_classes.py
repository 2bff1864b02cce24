"""Classes of ranks that are alike: one of each class is planned, simulated and proven live for all of its class.

Two ranks are alike when they run the same nodes on the same local shapes, and meet alike ranks in the same nodes.
Equal ranks may differ in where a shard begins, in the partner of a piece, and in the communicator: none of these says
how long an act takes, what it holds or what it waits for.

Classes are found by colour refinement (the coarsest equitable partition): ranks have one colour
when they run alike (`rank_features.py`); communicators when as many ranks of each colour use them in
the same places; ranks get different colours when their communicators in some place differ in colour.
Then, with the first rank of each class in its place (`docs/decisions/schedules.md` has the proof):

- a simulation of all ranks takes every act of a rank at the time at which its representative takes
  it, so that one of the representatives alone is the simulation of all;
- the orders that it finds are those of every rank, on the communicators of its own;
- a cycle of the marked graph of all ranks is one of the representatives', walked perhaps several
  times, of the same seconds for a copy, and the other way round.

For that, a representative meets the representatives of whom it meets (`ExchangePartners.open`): otherwise classes
are made smaller, in the worst case until each rank stands for itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from types import MappingProxyType
from typing import final

import numpy as np

from weft.boxing.box_steps import step_groups
from weft.boxing.transfer import EXCHANGES
from weft.compiler.schedule.equal_ranks.rank_features import (
    Colours,
    Numbers,
    by_calls,
    by_shapes,
    by_steps,
    by_windows,
)
from weft.compiler.signatures import TensorStep, tensor_steps
from weft.errors import InternalError
from weft.ir.legal.plans import verify_plan
from weft.ir.logical import LogicalGraph
from weft.ir.plan import Actor, Communicator, Order, RankPlan, Register


def rank_classes(
    graph: LogicalGraph,
    communicators: Sequence[Communicator],
    ranks: Sequence[int],
    by_memory: bool = True,
    kinds: Mapping[int, int] = MappingProxyType({}),
) -> dict[int, int]:
    """For each rank, the first rank that is equal to it.

    Args:
        by_memory: true if ranks of one class must also hold as much; without a limit, plans do not depend on it.
        kinds: for each rank the number of its kind of device, where there are several: those of one class have one.
    """
    colours, steps = Colours(ranks), tensor_steps(graph)
    numbers = np.array([kinds[rank] for rank in ranks] if kinds else [], dtype=np.int64)
    colours.split(colours.places(ranks if kinds else ()), numbers)
    own = by_shapes(graph), by_calls(graph), by_windows(graph), by_steps(steps, by_memory)
    for feature in chain(*own):
        colours.split(colours.places(feature.ranks), feature.of)
    meetings = ExchangePartners(steps, communicators, colours)
    meetings.refine(colours)
    while (finer := meetings.open(colours)) is not None:
        colours.split(*finer)
        meetings.refine(colours)
    return colours.first()


# Meetings: who is with whom in a communicator, in which steps of boxing.
#
# All that is said of a rank and a communicator is in one row of some arrays, so that a round over all ranks is a
# few sorts.


@final
class ExchangePartners:
    """The communicators that ranks use in steps of boxing.

    A rank and a communicator are one row: with the first step, of those that differ in their groups, in which the
    rank uses it. Ranks of one colour use each of theirs in the same steps (`__init__` sees to it), so that the first
    tells all.
    """

    __slots__ = ("_bounds", "_ids", "_places", "_rows_of_step", "_sizes", "_steps")

    def __init__(
        self, steps: Sequence[TensorStep], communicators: Sequence[Communicator], colours: Colours
    ) -> None:
        """Note who meets whom; parts ranks that use one communicator in other steps than others do.

        Args:
            steps: of all boxings.
            communicators: of these, ids counting from 0.
            colours: by which ranks that take part in other steps are separated already.
        """
        used = _used(steps, communicators, colours)
        places = np.concatenate([place for place, _ in used]) if used else _none()
        ids = np.concatenate([id for _, id in used]) if used else _none()
        numbers = np.repeat(np.arange(len(used)), [len(place) for place, _ in used])
        # For equal rows the first; all is sorted by communicator, then rank.
        keys = ids * len(colours.ranks) + places
        _, first, row = np.unique(keys, return_index=True, return_inverse=True)
        self._ids, self._places, self._steps = ids[first], places[first], numbers[first]
        self._bounds = np.flatnonzero(np.diff(self._ids, prepend=-1))
        self._sizes = np.array([len(each.ranks) for each in communicators], dtype=np.int64)
        self._rows_of_step = np.split(row, np.cumsum([len(place) for place, _ in used])[:-1])
        for (where, _), rows in zip(used, self._rows_of_step, strict=False):
            colours.split(where, self._steps[rows])

    def refine(self, colours: Colours) -> None:
        """Part ranks until those of one colour meet the same colours in the same places."""
        parted = len(self._ids) > 0
        while parted:
            seen = colours.of[self._places] * (int(self._steps.max()) + 1) + self._steps
            base = self._ids * (int(seen.max()) + 1)
            # Rows stand by communicator: sorted within each of them.
            each = np.split(np.sort(base + seen) - base, self._bounds[1:])
            sizes, firsts = (
                self._sizes[self._ids[self._bounds]],
                colours.of[self._places[self._bounds]],
            )
            known: dict[Hashable, int] = {}
            found = [
                known.setdefault((size, first, who.tobytes()), len(known))
                for size, first, who in zip(sizes.tolist(), firsts.tolist(), each, strict=True)
            ]
            met = np.repeat(np.array(found, dtype=np.int64), [len(who) for who in each])
            parted = False
            for rows in self._rows_of_step:
                parted |= colours.split(self._places[rows], met[rows])

    def open(self, colours: Colours) -> tuple[Numbers, Numbers] | None:
        """A feature that parts a class of which a communicator holds some in other places than others,
        or some but not the first though it holds another class's first. None when there is no such class.

        Returns:
            the places of ranks, and a number for each.
        """
        if not len(self._ids):
            return None
        firsts = colours.firsts()[self._places]
        count = len(colours.ranks)
        here = np.isin(self._ids * count + firsts, self._ids * count + self._places)
        partly = np.logical_or.reduceat(here, self._bounds) & ~np.logical_and.reduceat(
            here, self._bounds
        )
        wrong = partly | (self._distinct(firsts, self._steps) > self._distinct(firsts))
        if not wrong.any():
            return None
        rows = np.flatnonzero(self._ids == self._ids[self._bounds[int(wrong.argmax())]])
        return self._places[rows], self._steps[rows]

    def _distinct(self, *columns: Numbers) -> Numbers:
        """For each communicator, in how many ways its rows differ in some columns."""
        key = self._ids
        for column in columns:
            key = key * (int(column.max()) + 1) + column
        _, first = np.unique(key, return_index=True)
        found: Numbers = np.bincount(self._ids[first])[self._ids[self._bounds]]
        return found


def _used(
    steps: Sequence[TensorStep], communicators: Sequence[Communicator], colours: Colours
) -> list[tuple[Numbers, Numbers]]:
    """For each step, one of several on the same groups: the places of its ranks, and who uses which communicator."""
    ids = {each.ranks: each.id for each in communicators}
    found = {}
    for step, _, _ in steps:
        where = step.source.placement, step.target.placement, step.axis
        if step.kind in EXCHANGES and where not in found:
            groups = step_groups(step)
            numbers = [ids[group] for group in groups]
            places = colours.places(rank for group in groups for rank in group)
            found[where] = places, np.repeat(numbers, [len(group) for group in groups])
    return list(found.values())


def _none() -> Numbers:
    return np.zeros(0, dtype=np.int64)


# A plan with the copies and orders that were found for a rank that is alike.
#
# They have been simulated and proven live for both.


def like(plan: RankPlan, first: RankPlan) -> RankPlan:
    """`plan` with the copies and orders of `first`.

    Raises:
        InternalError: when the two ranks are not alike; names the difference.
    """
    queues: dict[str, str] = {}
    for own, other in zip(plan.actors, first.actors, strict=False):
        if (
            _shown_copy(own) != _shown_copy(other)
            or queues.setdefault(other.queue, own.queue) != own.queue
        ):
            raise _unlike(plan, first, f"actor {own.id}")
    if len(plan.actors) != len(first.actors) or len(set(queues.values())) != len(queues):
        raise _unlike(plan, first, "the number of actors, or of their queues")
    if list(map(_bare, plan.registers)) != list(map(_bare, first.registers)):
        raise _unlike(plan, first, "the registers")
    registers = tuple(
        replace(own, credits=other.credits)
        for own, other in zip(plan.registers, first.registers, strict=True)
    )
    orders = tuple(Order(queues[order.queue], order.acts) for order in first.orders)
    return verify_plan(replace(plan, registers=registers, orders=orders))


def _shown_copy(actor: Actor) -> tuple[object, ...]:
    """The facts of an actor that a simulation sees, but for its queue."""
    return type(actor), actor.id, actor.acts, actor.priority, actor.consumes, actor.produces


def _bare(register: Register) -> Register:
    return replace(register, credits=1)


def _unlike(plan: RankPlan, first: RankPlan, what: str) -> InternalError:
    return InternalError(
        f"ranks {first.rank} and {plan.rank} were planned as equal, but differ in {what}"
    )
