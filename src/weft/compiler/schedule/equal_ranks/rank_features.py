"""Features by which ranks differ: shapes, calls, windows and steps of boxing.

A feature is computed for the places of a grid, not for ranks, and once for equal grids,
such as those of pipeline stages. Places with equal shards run alike, so one of them is enough.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, TypeAlias, final

import numpy as np
from numpy.typing import NDArray

from weft.boxing import BoxingStep
from weft.boxing.box_steps import step_node
from weft.boxing.overlaps import regions_of
from weft.boxing.routes import distinct_rows, numbered_layouts, routes
from weft.compiler.signatures import TensorStep, axis_signatures, graph_halos
from weft.ir.logical import Call, LogicalGraph
from weft.ir.plan import Collective, LocalCall
from weft.layout import Broadcast, Layout, Split
from weft.ops import OpCall, Signature, adapts, shard_places
from weft.ops import localize as localize_call
from weft.ops.weft_ops import WEFT_OPS


@final
class Feature(NamedTuple):
    """A number for each of some ranks; those that differ in it are not alike."""

    ranks: tuple[int, ...]
    of: Numbers


def by_shapes(graph: LogicalGraph) -> Iterator[Feature]:
    """The placements that a rank is in, and its shard of every value of whose shards some are smaller."""
    for placement in graph.placements:
        yield Feature(placement.ranks, np.zeros(len(placement.ranks), dtype=np.int64))
    for value in {(v.layout, v.shape): v for v in graph.values.values()}.values():
        if not value.is_even:
            layout = value.laid
            yield Feature(layout.placement.ranks, _alike(_sizes(layout, value.shape)))


def by_calls(graph: LogicalGraph) -> Iterator[Feature]:
    """The calls that a rank runs whose arguments depend on the shard; of equal calls once."""
    seen: set[Hashable] = set()
    for node in graph.of_kind(Call):
        if not adapts(node.op):
            continue
        signatures = tuple(axis_signatures(graph, node))
        sbps = [sbp for one, _ in signatures for sbp in (*one.operands, *one.results)]
        if not any(isinstance(sbp, Split) for sbp in sbps):
            continue
        placement = node.makes[0].laid.placement
        times = graph.micro_batches if node.varyings else 1
        calls = tuple(node.call.at(micro) for micro in range(times))
        if (key := (calls, signatures, placement)) not in seen:
            seen.add(key)
            yield Feature(placement.ranks, _local_calls(calls, signatures))


@lru_cache(maxsize=1024)
def _local_calls(calls: tuple[OpCall, ...], axes: tuple[tuple[Signature, int], ...]) -> Numbers:
    """For each place of a grid, which local form of some calls runs there.

    Axis by axis: of the places at which the same runs up to here, but for where its shards begin, one is cut further.
    """
    forms, of = [calls], np.zeros((), dtype=np.int64)
    for signature, parts in axes:
        known: dict[Hashable, tuple[int, tuple[OpCall, ...]]] = {}
        table = np.empty((len(forms), parts), dtype=np.int64)
        for number, form in enumerate(forms):
            for index in range(parts):
                local = tuple([localize_call(call, signature, parts, index) for call in form])
                key = tuple([_shown(call) for call in local])
                table[number, index], _ = known.setdefault(key, (len(known), local))
        forms, of = [form for _, form in known.values()], table[of]
    return of.reshape(-1)


def by_windows(graph: LogicalGraph) -> Iterator[Feature]:
    """Ranks that exchange border rows stand for themselves: those at an edge have other neighbours."""
    for halo, _ in graph_halos(graph):
        ranks = tuple([rank for group in halo.groups for rank in group])
        yield Feature(ranks, np.array(ranks, dtype=np.int64))


def by_steps(steps: Iterable[TensorStep], by_memory: bool) -> Iterator[Feature]:
    """The nodes that a rank runs for steps of boxing, but for their peers and for where pieces begin."""
    for step, shape, dtype in steps:
        source, target = numbered_layouts(step.source, step.target)
        if step.kind == "transfer":
            sent, received = _transfers(source, target, shape)
            yield Feature(step.source.placement.ranks, sent)
            yield Feature(step.target.placement.ranks, received)
        elif step.kind != "reinterpret":
            alike = replace(step, source=source, target=target)
            yield Feature(step.source.placement.ranks, _nodes(alike, shape, dtype, by_memory))


@lru_cache(maxsize=1024)
def _nodes(step: BoxingStep, shape: tuple[int, ...], dtype: str, by_memory: bool) -> Numbers:
    """For each place of a grid, which node runs there for a step, with ranks numbered by their places.

    The lengths of the shards before, after and of what the group holds together say all of it, and whether a rank is
    the first of its group.
    """
    group = step.source.with_axis(step.axis, Broadcast())
    lengths = [_sizes(layout, shape) for layout in (step.source, step.target, group)]
    grid = step.source.placement.shape
    first = np.indices(grid)[step.axis].reshape(-1, 1) == 0
    kinds = _alike(np.concatenate([*lengths, first], axis=1))
    _, places = np.unique(kinds, return_index=True)
    known: dict[Hashable, int] = {}
    forms = [
        known.setdefault(
            _shown(step_node(step, "before", "after", shape, dtype, place, lambda _: 0), by_memory),
            len(known),
        )
        for place in places.tolist()
    ]
    return np.array(forms, dtype=np.int64)[kinds]


@lru_cache(maxsize=1024)
def _transfers(source: Layout, target: Layout, shape: tuple[int, ...]) -> tuple[Numbers, Numbers]:
    """For each place of the grid that sends, and of the one that receives, which lengths of pieces are its."""
    found = routes(source, target, shape)
    # For each rank of the source, which shard it has, by lengths, and which pieces of it it sends.
    known: dict[Hashable, int] = {}
    of = np.empty(len(found.shard_of), dtype=np.int64)
    lengths = found.shards[:, :, 1] - found.shards[:, :, 0]
    for shard, own in enumerate(lengths):
        given = found.given(shard)
        holders = np.flatnonzero(found.shard_of == shard)
        order = np.lexsort((*given.lengths.T, given.senders))
        senders, pieces = given.senders[order], given.lengths[order]
        begins, ends = (np.searchsorted(senders, holders, side) for side in ("left", "right"))
        for holder, begin, end in zip(holders, begins, ends, strict=True):
            key = own.tobytes(), int(end - begin), pieces[begin:end].tobytes()
            of[holder] = known.setdefault(key, len(known))
    # For each rank of the target, which lengths the pieces have that it gets; they fill what it needs.
    got: dict[Hashable, int] = {}
    first, needed = distinct_rows(found.needed)
    forms = []
    for place in first.tolist():
        pieces = found.taken(place)
        own = found.needed[place, :, 1] - found.needed[place, :, 0]
        order = np.lexsort((*pieces.T, np.zeros(len(pieces))))
        key = own.tobytes(), len(pieces), pieces[order].tobytes()
        forms.append(got.setdefault(key, len(got)))
    return of, np.array(forms, dtype=np.int64)[needed]


def _sizes(layout: Layout, shape: tuple[int, ...]) -> Numbers:
    starts, ends = regions_of((layout.sbp,), layout.placement.shape, shape)
    found: Numbers = (ends - starts)[0]
    return found


def _alike(rows: Numbers) -> Numbers:
    if not rows.shape[1]:
        return np.zeros(len(rows), dtype=np.int64)
    return np.unique(rows, axis=0, return_inverse=True)[1].reshape(-1)


def _shown(node: Any, by_memory: bool = True) -> Hashable:
    """A call or a collective without what may differ between ranks that are alike; None for no node."""
    if node is None or isinstance(node, Collective):
        return node
    places, count = shard_places(node.op), len(node.args)
    if not by_memory and node.op in WEFT_OPS:
        places = (*places, *WEFT_OPS[node.op].held)
    args = tuple(
        None if place in places or place - count in places else arg
        for place, arg in enumerate(node.args)
    )
    made = node.outputs if isinstance(node, LocalCall) else (node.operands, node.results)
    return node.op, args, node.kwargs, made


Numbers: TypeAlias = NDArray[np.int64]


@final
class Colours:
    """A colour for each of some ranks: one for all at first."""

    __slots__ = ("_count", "_next", "of", "ranks")

    def __init__(self, ranks: Iterable[int]) -> None:
        self.ranks: Numbers = np.unique(np.fromiter(ranks, dtype=np.int64))
        self.of: Numbers = np.zeros(len(self.ranks), dtype=np.int64)
        self._next, self._count = 1, 1

    def places(self, ranks: Iterable[int]) -> Numbers:
        """The places of ranks among all."""
        return np.searchsorted(self.ranks, np.fromiter(ranks, dtype=np.int64))

    def split(self, places: Numbers, feature: Numbers) -> bool:
        """Part ranks that differ in a feature, and from those that do not have it. True if any were separated.

        Args:
            places: of the ranks that have the feature.
            feature: a number for each of them, none below 0.
        """
        if not len(places):
            return False
        both = self.of[places] * (int(feature.max()) + 1) + feature
        found, of = np.unique(both, return_inverse=True)
        self.of[places] = of + self._next
        self._next += len(found)
        before, self._count = self._count, len(np.unique(self.of))
        return self._count > before

    def firsts(self) -> Numbers:
        """For each place, the place of the first rank of its colour."""
        _, first, of = np.unique(self.of, return_index=True, return_inverse=True)
        found: Numbers = first[of]
        return found

    def first(self) -> dict[int, int]:
        """For each rank the first of its colour."""
        firsts = self.ranks[self.firsts()]
        return dict(zip(self.ranks.tolist(), firsts.tolist(), strict=True))
