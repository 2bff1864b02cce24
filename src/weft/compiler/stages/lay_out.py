"""Lay out a graph stage by stage: layouts, boxing within each stage, and the stages joined again (`cut.py`).

Each stage is deduced on its own placement, in order. A value that comes from an earlier stage is wanted as it lies
there, along the axes that have as many ranks in both; one from a later stage, such as a gradient, as it is
cheapest to use.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.assignment import Assignment
from weft.compiler.context import Context, Stages
from weft.compiler.decompositions.fused_losses import fuse_class_losses
from weft.compiler.decompositions.table import expand
from weft.compiler.hints import GridHints, Hints
from weft.compiler.layouts.box import box, deduce
from weft.compiler.layouts.options import KnownGrids
from weft.compiler.layouts.solved_before import Solved
from weft.compiler.stages.cut import LaidOut, StageGraph, copy_sources, cut_stages, join_stages
from weft.errors import StrategyError
from weft.ir import verify
from weft.ir.logical import (
    Call,
    Input,
    LogicalGraph,
)
from weft.layout import Partial, Placement


@final
@dataclass(frozen=True)
class Deduced:
    """The bound on the layouts of a stage, in the cost model's bytes.

    Attributes:
        cost: what they cost.
        bound: the least that any could cost, along the axis solved last with the others as they are.
        proven: whether they are the cheapest, along each axis with the others as they are.
        broken: how often a parameter is used differently from the user laid it out, because its op
            admits nothing else.
        taken: whether they are those of another shape of the batch, of which all this is said.
        solved: the deduction, for further shapes.
    """

    stage: int
    cost: float
    bound: float
    proven: bool
    broken: int = 0
    taken: bool = False
    solved: Solved | None = field(default=None, repr=False, compare=False)

    @staticmethod
    def of(stage: int, solved: Solved) -> Deduced:
        found = solved.assignment
        known = found.cost, found.bound, found.proven, found.broken, found.taken
        return Deduced(stage, *known, solved)


def lay_out(
    graph: LogicalGraph, context: Context, before: Sequence[Deduced] = ()
) -> tuple[LogicalGraph, tuple[Deduced, ...]]:
    """The graph with layouts on all values and boxing between them, within stages and across.

    Also what is known of how good they are. Cut, then for each stage deduce, fuse, expand and box, then join.

    Args:
        before: what was deduced for another shape of the batch, with the same cost model.
    """
    _check_signatures(graph, context.hints)
    cache, stages, options = context.cache, context.stages, context.options
    earlier = {each.stage: each.solved for each in before}
    known = cache.of(KnownGrids, options.cost_model)
    graph, parts = cache.of(_cut, graph, stages)
    laid: list[LaidOut] = []
    deduced: list[Deduced] = []
    for part in parts:
        at, placement = part.stage, stages.placements[part.stage]
        hints = _own_hints(part, context.hints[placement.axes], placement, laid)
        given = part.graph, hints, placement
        other = earlier.get(at)
        taken = other.taken(*given) if other else None
        solved = taken or cache.of(_solved, *given, known, at=at)
        deduced.append(Deduced.of(at, solved))
        chosen = part.graph, solved.assignment, options.own_kernels
        laid.append(LaidOut(at, part.crossing, cache.of(_boxed, *chosen, at=at)))
    return cache.of(join_stages, graph, laid, stages), tuple(deduced)


def _check_signatures(graph: LogicalGraph, hints: GridHints) -> None:
    names = {name for one in hints.values() for name in one.signatures}
    if not names:
        return
    made = {node.makes[0].name for node in graph.of_kind(Call) if node.makes}
    for name in sorted(names - made):
        raise StrategyError(
            f"signatures={{{name!r}: …}} names no op of the step; use the name of an op's first result, such as "
            f"{', '.join(sorted(made)[:5])}"
        )


def _cut(graph: LogicalGraph, stages: Stages) -> tuple[LogicalGraph, tuple[StageGraph, ...]]:
    """The graph with what is cheap made where it is read, and its stages."""
    if len(stages.placements) == 1:
        return graph, (StageGraph(0, graph, {}),)
    copied = verify(copy_sources(graph))
    parts = cut_stages(copied, stages)
    for part in parts:
        verify(part.graph)
    return copied, parts


def _solved(graph: LogicalGraph, hints: Hints, placement: Placement, known: KnownGrids) -> Solved:
    found = deduce(graph, hints, placement, known.cost_model, known.of(placement.shape))
    return Solved(graph, hints, placement, found)


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
