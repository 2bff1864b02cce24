"""ZeRO: optimizer states, gradients and parameters in shards along one axis.

The levels are those of Rajbhandari et al. 2020 ("ZeRO", section 5). A sharded parameter's variable is
Split along the axis; its states and its update go with it. That alone turns the all-reduce of its
gradient into a reduce-scatter. The levels differ in how long the rest is whole:

- 1: the parameter is gathered once a step; gradients are added up over the micro-batches, then
  reduced;
- 2: the gradient of each micro-batch is reduced to its shard, and shards are added up;
- 3: and each module gathers its parameters for its forward, and again for its backward.

Each parameter has the level that the first pattern for it says.

Before: a graph without layouts, in which calls read parameters, and hints that lay some of them in shards. After:
calls read them through `weft.hint`, whole; at levels 2 and 3 the sums over micro-batches read gradients in shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from weft.compiler.context import Context
from weft.compiler.schedule.presets import turning_stage
from weft.compiler.training.gathers import Gather, gather_parameters
from weft.compiler.training.precision import CASTS
from weft.compiler.training.shards import shard_level
from weft.ir.logical import Call, Hint, Input, LogicalGraph, Node, Update, Value
from weft.ir.nodes import HINT, renamed
from weft.layout import SBP, Broadcast

ACCUMULATE = "weft.accumulate"


def shard_variables(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """The graph with gathers of what lies in shards, and at levels 2 and 3 with early reductions.

    Of what lies whole and is split where it is used, hints say so.

    Args:
        graph: without layouts.
        context: with what was chosen to lie in shards (`choose_shards`).
    """
    parts = {
        node.value.name: Gather((), _parts(context, node.key), False)
        for node in graph.of_kind(Input)
        if any(node.key in own.whole for own in context.hints.values())
    }
    if not context.stored:
        return gather_parameters(graph, parts) if parts else graph
    axis = next(iter(context.stored.values()))
    stored = [node for node in graph.of_kind(Input) if node.key in context.stored]
    shards = {
        node.value.name: _hints(context, axis, _home_sbps(context, node)[axis]) for node in stored
    }
    levels = {node.value.name: shard_level(context, node.key) for node in stored}
    whole = _hints(context, axis, Broadcast())
    gathers = {name: Gather(shard, whole, levels[name] == 3) for name, shard in shards.items()}
    early = {name: shard for name, shard in shards.items() if levels[name] > 1}
    made = gather_parameters(graph, {**gathers, **parts}, turning_stage(context))
    return _reduced_early(made, early) if early else made


def _parts(context: Context, key: str) -> tuple[Hint, ...]:
    """For each stage a hint that says how the strategy has a parameter used."""
    return tuple(
        Hint(context.hints[p.axes].inputs.get(key, (None,) * p.axes))
        for p in context.stages.placements
    )


def _home_sbps(context: Context, node: Input) -> tuple[SBP | None, ...]:
    """The SBPs that hints fix of a parameter, on the placement where it lives."""
    axes = context.stages.placements[context.stages.homes.get(node.key, 0)].axes
    return context.hints[axes].inputs[node.key]


def _hints(context: Context, stored: int, sbp: SBP | None) -> tuple[Hint, ...]:
    """For each stage a hint that fixes the axis of the shards alone."""
    return tuple(
        Hint(tuple(sbp if axis == stored else None for axis in range(placement.axes)), stored)
        for placement in context.stages.placements
    )


def _reduced_early(graph: LogicalGraph, shards: Mapping[str, tuple[Hint, ...]]) -> LogicalGraph:
    """Let gradients be reduced to shards before they are added up over the micro-batches."""
    wanted = {
        name: shards[update.target.name]
        for update in graph.of_kind(Update)
        if update.target.name in shards
        for name in _accumulated(graph, update.source.name)
    }
    nodes: list[Node] = []
    for node in graph.nodes:
        made = next((value.name for value in node.makes), "")
        if isinstance(node, Call) and made in wanted:
            hint = _shard_hint(graph, node, wanted[made][node.phase.stage])
            shard = hint.makes[0].name
            nodes += [hint, renamed(node, {node.uses[0]: shard})]
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _shard_hint(graph: LogicalGraph, reader: Call, hint: Hint) -> Call:
    source = graph.values[reader.uses[0]]
    shard = Value(f"{source.name}.shard", source.shape, source.dtype)
    args = (source.ref,)
    return Call.of(HINT, args, (shard,), location=reader.location, phase=reader.phase, hint=hint)


def _accumulated(graph: LogicalGraph, name: str) -> Iterator[str]:
    """The sums over micro-batches that a gradient is, or is the sum of, in whatever dtype."""
    node = graph.producers[name]
    if isinstance(node, Call) and node.op == ACCUMULATE:
        yield name
    elif isinstance(node, Call) and node.op in ("aten.add.Tensor", *CASTS):
        for used in dict.fromkeys(node.uses):
            yield from _accumulated(graph, used)
