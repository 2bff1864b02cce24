"""Lay out a graph stage by stage: layouts, boxing within each stage, and the stages joined again (`join.py`).

Each stage is deduced on its own placement, in order. A value that comes from an earlier stage is wanted as it lies
there, along the axes that have as many ranks in both; one from a later stage, such as a gradient, as it is
cheapest to use.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import final

from weft.compiler.assignment import Assignment
from weft.compiler.context import Context, PassCache, Stages
from weft.compiler.decompositions.class_loss import fuse_class_losses
from weft.compiler.decompositions.table import expand
from weft.compiler.hints import GridHints, Hints
from weft.compiler.layouts.box import box, deduce
from weft.compiler.layouts.options import Known
from weft.compiler.layouts.solved_before import Solved
from weft.compiler.stages.cut import LaidOut, StageGraph, copy_sources, cut_stages, join_stages
from weft.errors import StrategyError
from weft.hardware import CostModel
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
        broken: how often a parameter is used otherwise than the user laid it out, because its op
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

    Also what is known of how good they are.

    Args:
        before: what was deduced for another shape of the batch, with the same cost model.
    """
    hints, stages = context.hints, context.stages
    _check_signatures(graph, hints)
    known = {each.stage: each.solved for each in before}
    options = context.options
    solver = _Solver(options.cost_model, known, context.kept, options.own_kernels)
    if len(stages.placements) == 1:
        placement = stages.placements[0]
        solved = solver.solve(0, graph, hints[placement.axes], placement)
        return solver.boxed(0, solved), (Deduced.of(0, solved),)
    laid: list[LaidOut] = []
    deduced: list[Deduced] = []
    graph, parts = solver.kept.of(
        "cut_stages", (graph, stages), lambda: _cut_by_stage(graph, stages)
    )
    for part in parts:
        placement = stages.placements[part.stage]
        own = _own_hints(part, hints[placement.axes], placement, laid)
        solved = solver.solve(part.stage, part.graph, own, placement)
        laid.append(LaidOut(part.stage, part.crossing, solver.boxed(part.stage, solved)))
        deduced.append(Deduced.of(part.stage, solved))
    joined = solver.kept.of(
        "join_stages", (graph, laid, stages), lambda: join_stages(graph, laid, stages)
    )
    return joined, tuple(deduced)


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


def _cut_by_stage(
    graph: LogicalGraph, stages: Stages
) -> tuple[LogicalGraph, tuple[StageGraph, ...]]:
    """The graph with what is cheap made where it is read, and its stages."""
    copied = verify(copy_sources(graph))
    parts = cut_stages(copied, stages)
    for part in parts:
        verify(part.graph)
    return copied, parts


def _boxed(graph: LogicalGraph, assignment: Assignment, own_kernels: bool) -> LogicalGraph:
    """A stage with what deduction chose in its own calls and boxings."""
    if own_kernels:
        graph, assignment = fuse_class_losses(graph, assignment)
    graph, assignment = expand(verify(graph), assignment)
    return verify(box(verify(graph), assignment), with_layouts=True)


@final
@dataclass
class _Solver:
    """Deduces stages: as before, where that fits, else anew.

    Attributes:
        before: of stages, what was deduced for another shape of the batch.
        kept: stages that were deduced for other plans.
        known: what deductions on grids of one shape remember.
    """

    cost_model: CostModel
    before: Mapping[int, Solved | None]
    kept: PassCache
    own_kernels: bool
    known: dict[tuple[int, ...], Known] = field(default_factory=dict)

    def solve(
        self,
        stage: int,
        graph: LogicalGraph,
        hints: Hints,
        placement: Placement,
    ) -> Solved:
        before = self.before.get(stage)
        found = before.taken(graph, hints, placement) if before else None
        if found is None:
            return self.kept.of(
                f"deduce {stage}",
                (graph, hints, placement, self.cost_model),
                lambda: self._anew(graph, hints, placement),
            )
        return Solved(graph, hints, placement, found)

    def _anew(self, graph: LogicalGraph, hints: Hints, placement: Placement) -> Solved:
        known = self._known(placement.shape)
        return Solved(
            graph, hints, placement, deduce(graph, hints, placement, self.cost_model, known)
        )

    def _known(self, grid: tuple[int, ...]) -> Known:
        if not self.kept.most:
            return self.known.setdefault(grid, Known(grid, self.cost_model))
        made: Known = self.kept.lasting.setdefault(
            (grid, self.cost_model), Known(grid, self.cost_model)
        )
        return made

    def boxed(self, stage: int, solved: Solved) -> LogicalGraph:
        """A stage with what deduction chose in it."""
        given = solved.graph, solved.assignment, self.own_kernels
        return self.kept.of(f"box {stage}", given, lambda: _boxed(*given))


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
