"""Features that part ranks which do not run alike: shapes, calls, windows and boxings of each, by rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from weft.boxing import steps
from weft.boxing.box_steps import step_node
from weft.compiler.halos import graph_halos
from weft.compiler.local.local_calls import localized_call
from weft.compiler.signatures import axis_signatures
from weft.ir.logical import Box, Call, LogicalGraph, Value, node_outputs
from weft.ir.plan import Collective, Communicator, Exchange, LocalCall, LocalNode, Transfer
from weft.ir.queries.layouts import layout_of, lies_evenly
from weft.ir.queries.op_calls import op_call
from weft.layout import Split
from weft.ops import adapts, shard_places
from weft.ops.weft_ops import WEFT_OPS
from weft.units import ITEM_SIZE


def by_shapes(graph: LogicalGraph) -> Iterator[dict[int, Hashable]]:
    """The placements that a rank is in, and its shard of every value of whose shards some are smaller."""
    for placement in graph.placements:
        yield dict.fromkeys(placement.ranks, True)
    for value in {(v.layout, v.shape): v for v in graph.values.values()}.values():
        if not lies_evenly(value):
            layout = layout_of(value)
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
        value = next(value for value in node_outputs(node) if value is not None)
        placement = layout_of(value).placement
        times = graph.micro_batches if node.varyings else 1
        calls = tuple(op_call(graph, node, micro) for micro in range(times))
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
        ranks = {*layout_of(source).placement.ranks, *layout_of(target).placement.ranks}
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
    before, after = layout_of(source), layout_of(target)
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
