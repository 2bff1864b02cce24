"""Lay out a graph stage by stage: layouts, boxing within each stage, and the stages joined again (`cut.py`).

Each stage is deduced on its own placement, in order. A value that comes from an earlier stage keeps its layout along
the axes that have as many ranks in both; a value from a later stage, such as a gradient, gets the cheapest layout to
use.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import prod
from typing import final

from weft.compiler.assignment import Assignment
from weft.compiler.context import Context, Stages
from weft.compiler.decompositions.fused_losses import fuse_class_losses
from weft.compiler.decompositions.table import expand
from weft.compiler.hints import Hints, is_hint
from weft.compiler.layouts.box import box, deduce
from weft.compiler.layouts.intent import storage
from weft.compiler.layouts.options import KnownGrids
from weft.compiler.stages.cut import LaidOut, StageGraph, copy_sources, cut_stages, join_stages
from weft.errors import LayoutError, StrategyError
from weft.ir import verify
from weft.ir.logical import Call, Input, LogicalGraph, Phase
from weft.layout import Broadcast, Partial, Placement
from weft.ops import Signature

# A tensor of a batch of another shape may be so many times as large or as small for layouts to be taken over.
NEAR = 2


@final
@dataclass(frozen=True)
class Deduced:
    """The layouts of a stage, and the input of its deduction.

    Attributes:
        taken: true if they were cheapest for a batch of another shape, whose cost and bound `assignment` has.
    """

    stage: int
    graph: LogicalGraph = field(repr=False, compare=False)
    hints: Hints = field(repr=False, compare=False)
    placement: Placement
    assignment: Assignment = field(repr=False)
    taken: bool = False


def lay_out(
    graph: LogicalGraph, context: Context, before: Sequence[Deduced] = ()
) -> tuple[LogicalGraph, tuple[Deduced, ...]]:
    """The graph with layouts on all values and boxing between them, within stages and across.

    Cut, then for each stage deduce, fuse, expand and box, then join.

    Args:
        before: what was deduced for another shape of the batch, with the same cost model.
    """
    made = {node.makes[0].name for node in graph.of_kind(Call) if node.makes}
    for name in sorted({name for one in context.hints.values() for name in one.signatures} - made):
        raise StrategyError(
            f"signatures={{{name!r}: …}} names no op of the step; use the name of an op's first result, such as "
            f"{', '.join(sorted(made)[:5])}"
        )
    cache, stages, options = context.cache, context.stages, context.options
    earlier = {each.stage: each for each in before}
    known = cache.of(KnownGrids, options.cost_model)
    graph, parts = cache.of(_cut, graph, stages)
    laid: list[LaidOut] = []
    deduced: list[Deduced] = []
    for part in parts:
        at, placement = part.stage, stages.placements[part.stage]
        hints = _own_hints(part, context.hints[placement.axes], placement, laid)
        given = part.graph, hints, placement, known, at, earlier.get(at)
        deduced.append(cache.of(_deduced, *given, at=at))
        chosen = part.graph, deduced[-1].assignment, options.own_kernels
        laid.append(LaidOut(at, part.crossing, cache.of(_boxed, *chosen, at=at)))
    return cache.of(join_stages, graph, laid, stages), tuple(deduced)


def _cut(graph: LogicalGraph, stages: Stages) -> tuple[LogicalGraph, tuple[StageGraph, ...]]:
    """The graph with what is cheap made where it is read, and its stages."""
    if len(stages.placements) == 1:
        return graph, (StageGraph(0, graph, {}),)
    copied = verify(copy_sources(graph))
    parts = cut_stages(copied, stages)
    for part in parts:
        verify(part.graph)
    return copied, parts


def _deduced(
    graph: LogicalGraph,
    hints: Hints,
    placement: Placement,
    known: KnownGrids,
    stage: int,
    before: Deduced | None,
) -> Deduced:
    """The layouts of a stage: those `before`, where sizes are close and the rules allow them; else the cheapest."""
    model, grid = known.cost_model, known.of(placement.shape)
    pinned = signatures_before(before, graph, hints, placement) if before else {}
    if before and pinned:
        pins = replace(hints, signatures=pinned)
        with suppress(
            LayoutError
        ):  # no rule admits a signature, or it leaves a rank without elements
            again, first = deduce(graph, pins, placement, model, grid), before.assignment
            if again.broken == first.broken:
                known_costs = first.cost, first.bound, first.proven, first.broken
                laid = Assignment(again.values, again.operands, again.shared, *known_costs)
                return Deduced(stage, graph, hints, placement, laid, taken=True)
    return Deduced(stage, graph, hints, placement, deduce(graph, hints, placement, model, grid))


def signatures_before(
    before: Deduced, graph: LogicalGraph, hints: Hints, placement: Placement
) -> dict[str, tuple[Signature, ...]]:
    """The signatures of calls as deduced for a batch of another shape, by the names of their first results.

    The result is empty if the graphs differ in more than sizes and slices (a table of positions that is as long as
    the batch is not sliced), where a tensor is more than `NEAR` times as large or as small, and where hints differ.
    Calls that make what is stored in shards are left out: where it is stored decides their layouts.
    """
    values, operands = before.assignment.values, before.assignment.operands
    said = before.hints.stored, before.hints.signatures, before.hints.whole
    if not (
        placement == before.placement
        and _is_near(before.graph, graph)
        and (hints.stored, hints.signatures, hints.whole) == said
        and all(
            wanted in (None, sbp)
            for node in before.graph.of_kind(Input)
            if node.key in hints.inputs and node.key not in hints.whole
            for wanted, sbp in zip(hints.inputs[node.key], values[node.value.name].sbp, strict=True)
        )
    ):
        return {}
    axes = range(placement.axes)
    stored = {
        name
        for axis in set(hints.stored.values())
        for name in storage(graph, hints.stored, axis).made
    }
    calls = {_call_kind(node): node for node in graph.of_kind(Call) if not is_hint(node)}
    found: dict[str, tuple[Signature, ...]] = {}
    for number, node in enumerate(before.graph.nodes):
        if (
            isinstance(node, Call)
            and _call_kind(node) in calls
            and stored.isdisjoint(node.output_names)
        ):
            results = [values.get(name) for name in node.output_names]
            found[node.makes[0].name] = tuple(
                Signature(
                    tuple([layout.sbp[axis] for layout in operands[number]]),
                    tuple([one.sbp[axis] if one else Broadcast() for one in results]),
                )
                for axis in axes
            )
    return found


def _is_near(one: LogicalGraph, other: LogicalGraph) -> bool:
    """True if two graphs have the same calls, but for slices, on tensors of about the same sizes."""
    kinds = ({_call_kind(node) for node in graph.of_kind(Call)} for graph in (one, other))
    differing = set.symmetric_difference(*kinds)
    pairs = {
        (value.dtype, value.shape, other.values[name].dtype, other.values[name].shape)
        for name, value in one.values.items()
        if name in other.values
    }
    return (
        one.micro_batches == other.micro_batches
        and all(op == "aten.slice.Tensor" for _, op, _ in differing)
        and all(
            dtype == other_dtype
            and len(shape) == len(other_shape)
            and max(prod(shape), prod(other_shape)) <= NEAR * min(prod(shape), prod(other_shape))
            for dtype, shape, other_dtype, other_shape in pairs
        )
    )


def _call_kind(call: Call) -> tuple[str, str, Phase]:
    return call.makes[0].name if call.makes else "", call.op, call.phase


def _boxed(graph: LogicalGraph, assignment: Assignment, own_kernels: bool) -> LogicalGraph:
    """A stage with what deduction chose in its own calls and boxings."""
    if own_kernels:
        graph, assignment = fuse_class_losses(graph, assignment)
    graph, assignment = expand(verify(graph), assignment)
    return verify(box(verify(graph), assignment), with_layouts=True)


def _own_hints(
    part: StageGraph, hints: Hints, placement: Placement, earlier: Sequence[LaidOut]
) -> Hints:
    keys = {node.key for node in part.graph.of_kind(Input)} - set(part.crossing)
    found = {key: sbps for key, sbps in hints.inputs.items() if key in keys}
    for here, there in part.crossing.items():
        values = [value for stage in earlier for value in stage.standing(there)]
        layouts = [value.laid for value in values]
        whole = (x for x in layouts if not any(isinstance(sbp, Partial) for sbp in x.sbp))
        layout = next(whole, None)
        if layout is not None and layout.placement.axes == placement.axes:
            sizes = zip(layout.sbp, layout.placement.shape, placement.shape, strict=True)
            found[here] = tuple([sbp if before == now > 1 else None for sbp, before, now in sizes])
    return replace(hints, inputs=found, leaving=part.leaving)
