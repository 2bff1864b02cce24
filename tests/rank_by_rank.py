"""Classes of equal ranks, found by looking at every rank: as `compiler/schedule/equal_ranks` must find them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

from weft.boxing import steps
from weft.boxing.box_steps import step_node
from weft.compiler.local.localize import localized_call
from weft.compiler.signatures import axis_signatures, graph_halos
from weft.ir.logical import Box, Call, LogicalGraph, Value
from weft.ir.plan import Collective, Communicator, Exchange, LocalCall, LocalNode, Transfer
from weft.layout import Split
from weft.ops import adapts, shard_places
from weft.ops.weft_ops import WEFT_OPS
from weft.units import ITEM_SIZE


def classes_rank_by_rank(
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


def by_shapes(graph: LogicalGraph) -> Iterator[dict[int, Hashable]]:
    """The placements that a rank is in, and its shard of every value of whose shards some are smaller."""
    for placement in graph.placements:
        yield dict.fromkeys(placement.ranks, True)
    for value in {(v.layout, v.shape): v for v in graph.values.values()}.values():
        if not value.is_even:
            layout = value.laid
            yield {r: layout.local_shape(value.shape, r) for r in layout.placement.ranks}


def by_calls(graph: LogicalGraph) -> Iterator[dict[int, Hashable]]:
    """The calls that a rank runs whose arguments depend on the shard; of equal calls once."""
    seen: set[Hashable] = set()
    for node in graph.of_kind(Call):
        if not adapts(node.op):
            continue
        signatures = tuple(axis_signatures(graph, node))
        if not any(_splits(signature) for signature, _ in signatures):
            continue
        value = next(value for value in node.makes if value is not None)
        placement = value.laid.placement
        times = graph.micro_batches if node.varyings else 1
        calls = tuple(node.call.at(micro) for micro in range(times))
        if (key := (calls, signatures, placement)) not in seen:
            seen.add(key)
            yield {rank: _shown(localized_call(graph, node, rank)) for rank in placement.ranks}


def _splits(signature: Any) -> bool:
    return any(isinstance(sbp, Split) for sbp in (*signature.operands, *signature.results))


def by_windows(graph: LogicalGraph) -> Iterator[dict[int, Hashable]]:
    """Ranks that exchange border rows stand for themselves: those at an edge have other neighbours."""
    for halo, _ in graph_halos(graph):
        yield {rank: rank for group in halo.groups for rank in group}


def by_boxes(
    graph: LogicalGraph,
    communicators: Sequence[Communicator],
    uses: Mapping[int, list[int]],
    by_memory: bool,
) -> Iterator[dict[int, Hashable]]:
    """The nodes that a rank runs for boxings; `uses` gets the communicators, in order. Of equal boxings once."""
    ids = {each.ranks: each.id for each in communicators}
    seen: set[Hashable] = set()
    for node in graph.of_kind(Box):
        source, target = graph.values[node.input.name], node.output
        key = source.layout, target.layout, source.shape, source.dtype
        if key in seen:
            continue
        seen.add(key)
        ranks = {*source.laid.placement.ranks, *target.laid.placement.ranks}
        feature: dict[int, Hashable] = {}
        for rank in sorted(ranks):
            nodes = _box_nodes(source, target, rank, ids)
            uses[rank].extend(one.communicator for one in nodes if isinstance(one, Exchange))
            feature[rank] = tuple(_shown(one, by_memory) for one in nodes)
        yield feature


def _box_nodes(
    source: Value, target: Value, rank: int, ids: Mapping[tuple[int, ...], int]
) -> list[LocalNode]:
    """The nodes that a rank runs for a boxing."""
    before, after = source.laid, target.laid
    chain = steps(before, after, source.shape, ITEM_SIZE[source.dtype])
    found = (
        step_node(step, "before", "after", source.shape, source.dtype, rank, ids.__getitem__)
        for step in chain
    )
    return [node for node in found if node is not None]


def _shown(node: Any, by_memory: bool = True) -> Hashable:
    """A call or an exchange without what may differ between ranks that are alike."""
    match node:
        case Collective():
            return replace(node, communicator=0)
        case Transfer():
            sends, receives = (
                tuple(sorted(tuple(length for _, length in region) for _, region in pieces))
                for pieces in (node.sends, node.receives)
            )
            return node.input, node.output, sends, receives, node.bytes
    places, count = shard_places(node.op), len(node.args)
    if not by_memory and node.op in WEFT_OPS:
        places = (*places, *WEFT_OPS[node.op].held)
    args = tuple(
        None if place in places or place - count in places else arg
        for place, arg in enumerate(node.args)
    )
    made = node.outputs if isinstance(node, LocalCall) else (node.operands, node.results)
    return node.op, args, node.kwargs, made
