"""Classes of ranks that are alike: one of each class is planned, simulated and proven live for all of its class.

Two ranks are alike when they run the same nodes on the same local shapes, and meet alike ranks in
the same nodes. What may differ is where a shard begins, which piece goes to whom, and which
communicator it is: none of it says how long an act takes, what it holds or what it waits for.

A class is found as colours are refined (the coarsest equitable partition): ranks have one colour
when they run alike (`features.py`); communicators when as many ranks of each colour use them in
the same places; ranks lose a common colour when their communicators in some place have not one.
Then, with the first rank of each class in its place (`docs/decisions/schedules.md` has the proof):

- a simulation of all ranks takes every act of a rank at the time at which its representative takes
  it, so that one of the representatives alone is the simulation of all;
- the orders that it finds are those of every rank, on the communicators of its own;
- a cycle of the marked graph of all ranks is one of the representatives', walked perhaps several
  times, of the same seconds for a copy, and the other way round.

For that, a representative meets the representatives of whom it meets (`_Meetings.open`): otherwise classes
are made smaller, in the worst case until each rank stands for itself.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from weft.compiler.schedule.fold.features import by_boxes, by_calls, by_shapes, by_windows
from weft.ir.logical import LogicalGraph
from weft.ir.plan import Communicator


def rank_classes(
    graph: LogicalGraph,
    communicators: Sequence[Communicator],
    ranks: Sequence[int],
    by_memory: bool = True,
) -> dict[int, int]:
    """For each rank, the first of those that are like it.

    Args:
        graph: with layouts on all values.
        communicators: of all its boxings.
        ranks: of all its placements.
        by_memory: true where ranks of one class must also hold as much; without a limit, plans do not depend on it.
    """
    colours = _Colours(dict.fromkeys(sorted(ranks), 0))
    for feature in (*by_shapes(graph), *by_calls(graph), *by_windows(graph)):
        colours.split(feature)
    uses: dict[int, list[int]] = {rank: [] for rank in ranks}
    for feature in by_boxes(graph, communicators, uses, by_memory):
        colours.split(feature)
    places = {rank: _places(used) for rank, used in uses.items()}
    colours.split({rank: tuple(place.values()) for rank, place in places.items()})
    meetings = _Meetings({each.id: each.ranks for each in communicators}, uses, places)
    meetings.refine(colours)
    while (finer := meetings.open(colours)) is not None:
        colours.split(finer)
        meetings.refine(colours)
    return colours.first()


@final
@dataclass(frozen=True)
class _Colours:
    """The colour of each rank, in the order of ranks."""

    of: dict[int, int]

    def split(self, feature: Mapping[int, Hashable]) -> bool:
        """Part ranks that differ in a feature; ranks without it have None. True where any were parted."""
        before, known = len(set(self.of.values())), dict[Hashable, int]()
        for rank, colour in self.of.items():
            self.of[rank] = known.setdefault((colour, feature.get(rank)), len(known))
        return len(known) > before

    def first(self) -> dict[int, int]:
        """For each rank the first of its colour."""
        found: dict[int, int] = {}
        return {rank: found.setdefault(colour, rank) for rank, colour in self.of.items()}


def _places(used: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For each communicator, in the order of their first use, the places where it is used."""
    found: dict[int, tuple[int, ...]] = {}
    for place, id in enumerate(used):
        found[id] = (*found.get(id, ()), place)
    return found


@final
@dataclass(frozen=True)
class _Meetings:
    """The meetings of ranks: who is with whom in a communicator.

    Attributes:
        ranks: of each communicator.
        uses: of each rank: its communicators in order.
        places: of each rank: where each of its communicators is used.
    """

    ranks: Mapping[int, tuple[int, ...]]
    uses: Mapping[int, Sequence[int]]
    places: Mapping[int, Mapping[int, tuple[int, ...]]]
    _known: dict[Hashable, int] = field(default_factory=dict)

    def refine(self, colours: _Colours) -> None:
        """Part ranks until those of one colour meet the same colours in the same places."""
        parted = True
        while parted:
            met = {id: self._met(id, ranks, colours) for id, ranks in self.ranks.items()}
            parted = colours.split(
                {rank: tuple(met[id] for id in place) for rank, place in self.places.items()}
            )

    def _met(self, id: int, ranks: Sequence[int], colours: _Colours) -> int:
        """The colour of a communicator: its first rank's, and how many of each use it where."""
        users = [rank for rank in sorted(ranks) if id in self.places[rank]]
        there = sorted((colours.of[rank], self.places[rank][id]) for rank in users)
        key = len(ranks), tuple(colours.of[rank] for rank in users[:1]), tuple(there)
        return self._known.setdefault(key, len(self._known))

    def open(self, colours: _Colours) -> dict[int, Hashable] | None:
        """A feature that parts a class of which a communicator holds some in other places than others,
        or some but not the first though it holds another class's first. None when there is no such class.
        """
        first = colours.first()
        for id, ranks in self.ranks.items():
            users = [rank for rank in ranks if id in self.places[rank]]
            where: dict[int, Hashable] = {rank: (id, self.places[rank][id]) for rank in users}
            if len({(first[rank], where[rank]) for rank in users}) > len(
                {first[rank] for rank in users}
            ):
                return where
            met = {first[rank] for rank in users}
            if met & set(users) and not met <= set(users):
                return where
        return None
