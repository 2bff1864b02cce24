"""Lay out a graph stage by stage, and join the stages by boxing between their placements.

Each stage is deduced on its own placement, in order. A value that comes from an earlier stage is
wanted as it lies there, along the axes that have as many ranks in both; one from a later stage,
such as a gradient, as it is cheapest to use. Between the two stands one boxing, right after the
value is made; it starts from a layout in which the value stands there anyway. What the step returns
goes to all ranks of all stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from weft.boxing import steps
from weft.cached import cached_property
from weft.compiler.assignment import Assignment
from weft.compiler.context import Context, Stages
from weft.compiler.families.class_loss import fuse_class_losses
from weft.compiler.families.table import expand
from weft.compiler.hints import Hints
from weft.compiler.layouts.alike import Solved
from weft.compiler.layouts.box import box, describe
from weft.compiler.layouts.deduce import deduce
from weft.compiler.layouts.known import Known
from weft.compiler.stages.cut import StageGraph, copy_sources, cut_stages
from weft.hardware import CostModel
from weft.ir import verify
from weft.ir.layouts import layout_of
from weft.ir.logical import (
    ROLES,
    Box,
    Call,
    Input,
    LogicalGraph,
    Node,
    Output,
    Ref,
    Update,
    Value,
    node_outputs,
)
from weft.layout import SBP, Layout, Partial, Placement
from weft.units import ITEM_SIZE


@dataclass(frozen=True)
class Deduced:
    """How good the layouts of a stage are known to be, in the cost model's bytes.

    Attributes:
        stage: its number.
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
        graph: without layouts; its calls have stages.
        context: with hints for every number of axes that a placement has, stages, and the cost model.
        before: what was deduced for another shape of the batch, with the same cost model.
    """
    hints, stages = context.hints, context.stages
    solver = _Solver(context.options.cost_model, {each.stage: each.solved for each in before})
    if len(stages.placements) == 1:
        placement = stages.placements[0]
        solved = solver.solve(0, graph, hints[placement.axes], placement)
        return _boxed(graph, solved.assignment), (Deduced.of(0, solved),)
    graph = verify(copy_sources(graph))
    laid: list[LaidOut] = []
    deduced: list[Deduced] = []
    for part in cut_stages(graph, stages):
        verify(part.graph)
        placement = stages.placements[part.stage]
        own = _own_hints(part, hints[placement.axes], placement, laid)
        solved = solver.solve(part.stage, part.graph, own, placement)
        laid.append(LaidOut(part.stage, part.crossing, _boxed(part.graph, solved.assignment)))
        deduced.append(Deduced.of(part.stage, solved))
    return join_stages(graph, laid, stages), tuple(deduced)


def _boxed(graph: LogicalGraph, assignment: Assignment) -> LogicalGraph:
    """A stage with what deduction chose in its own calls and boxings."""
    graph, assignment = fuse_class_losses(graph, assignment)
    graph, assignment = expand(verify(graph), assignment)
    return verify(box(verify(graph), assignment), with_layouts=True)


@dataclass(frozen=True)
class _Solver:
    """Deduces stages: as before, where that fits, else anew.

    Attributes:
        cost_model: for deduction.
        before: of stages, what was deduced for another shape of the batch.
        known: what deductions on grids of one shape remember.
    """

    cost_model: CostModel
    before: Mapping[int, Solved | None]
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
            grid = placement.shape
            known = self.known.setdefault(grid, Known(grid, self.cost_model))
            found = deduce(graph, hints, placement, self.cost_model, known)
        return Solved(graph, hints, placement, found)


@dataclass(frozen=True)
class LaidOut:
    """One stage's part of the graph, with layouts and boxing.

    Attributes:
        stage: its number.
        crossing: for each input that another stage makes: name here -> name there.
        graph: its nodes.
    """

    stage: int
    crossing: Mapping[str, str]
    graph: LogicalGraph

    def standing(self, name: str) -> list[Value]:
        """A value in the layouts in which it stands in this stage: as it is made, then boxed.

        An input counts only as it comes: it is boxed late, before its first reader.
        """
        if name not in self.graph.values or name in self.crossing:
            return []
        found = [self.graph.values[name]]
        if isinstance(self.graph.producers[name], Input):
            return found
        boxes: list[Box] = self.graph.of_kind(Box)
        return found + [node.output for node in boxes if self.origin(node) == name]

    def origin(self, node: Box) -> str:
        """The value that a chain of boxings begins with."""
        name = node.input.name
        while isinstance(producer := self.graph.producers[name], Box):
            name = producer.input.name
        return name

    @cached_property
    def chunks(self) -> tuple[tuple[Node, ...], ...]:
        """Calls and boxings in pieces of one call each, which may be moved against other stages' pieces.

        A call stands with the boxings of inputs that are due before it and those of its results;
        what is due after all calls is a last piece.
        """
        pieces: list[list[Node]] = []
        due: list[Node] = []
        for node in self.graph.nodes:
            match node:
                case Call():
                    pieces.append([*due, node])
                    due = []
                case Box():
                    late = isinstance(self.graph.producers[self.origin(node)], Input)
                    (due if late else pieces[-1]).append(node)
        return tuple(map(tuple, [*pieces, due]))


def _own_hints(
    part: StageGraph, hints: Hints, placement: Placement, earlier: Sequence[LaidOut]
) -> Hints:
    """The hints for a stage's inputs: the user's, and where values of earlier stages lie."""
    keys = {node.key for node in part.graph.of_kind(Input)} - set(part.crossing)
    found = {key: sbps for key, sbps in hints.inputs.items() if key in keys}
    for here, there in part.crossing.items():
        values = [value for stage in earlier for value in stage.standing(there)]
        layouts = [layout_of(value) for value in values]
        whole = (x for x in layouts if not any(isinstance(sbp, Partial) for sbp in x.sbp))
        layout = next(whole, None)
        if layout is not None and layout.placement.axes == placement.axes:
            found[here] = tuple(map(_kept, layout.sbp, layout.placement.shape, placement.shape))
    return replace(hints, inputs=found)


def _kept(sbp: SBP, there: int, here: int) -> SBP | None:
    """The SBP that a value keeps along an axis when it comes from `there` ranks to `here`; None for any."""
    return sbp if there == here > 1 else None


def join_stages(graph: LogicalGraph, parts: Sequence[LaidOut], stages: Stages) -> LogicalGraph:
    """The stages as one graph with layouts, in the order of `graph`, which was cut into them."""
    arrivals = _arrivals(parts)
    inputs = [
        node
        for part in parts
        for node in part.graph.of_kind(Input)
        if node.value.name not in part.crossing
    ]
    inputs.sort(key=lambda node: ROLES.index(node.role))
    nodes: list[Node] = list(inputs)
    nodes += [box for node in inputs for box in arrivals.get(node.value.name, ())]
    waiting = {part.stage: deque(part.chunks) for part in parts}
    made: set[str] = set()
    there = {part.stage: part.graph.values for part in parts}
    for call in graph.of_kind(Call):
        # Calls of a loss over split classes have made way for others, which come before the next.
        kept = (v.name for v in node_outputs(call) if v.name in there[call.phase.stage])
        name = next(kept, None)
        while name is not None and name not in made:
            for node in waiting[call.phase.stage].popleft():
                names = [value.name for value in node_outputs(node)]
                made.update(names)
                nodes += [node, *(box for name in names for box in arrivals.get(name, ()))]
    nodes += [node for chunks in waiting.values() for chunk in chunks for node in chunk]
    sent, outputs = _outputs(graph, parts, stages)
    return replace(graph, nodes=(*nodes, *sent, *_updates(graph, parts), *outputs))


def _arrivals(parts: Sequence[LaidOut]) -> dict[str, list[Box]]:
    """The boxings between stages, by the value from which they start."""
    found: dict[str, list[Box]] = {}
    for part in parts:
        for here, there in part.crossing.items():
            output = part.graph.values[here]
            values = [value for other in parts for value in other.standing(there)]
            source = min(values, key=lambda value: _moved(value, layout_of(output)))
            reader = part.graph.users[here][0]
            cause = reader.cause if isinstance(reader, Box) else describe(reader, part.graph)
            found.setdefault(source.name, []).append(Box(Ref(source.name), output, cause))
    return found


def _moved(value: Value, layout: Layout) -> int:
    """Bytes that boxing `value` to `layout` moves."""
    chain = steps(layout_of(value), layout, value.shape, ITEM_SIZE[value.dtype])
    return sum(step.bytes for step in chain)


def _updates(graph: LogicalGraph, parts: Sequence[LaidOut]) -> Iterator[Update]:
    found = {node.target.name: node for part in parts for node in part.graph.of_kind(Update)}
    yield from (found[node.target.name] for node in graph.of_kind(Update))


def _outputs(
    graph: LogicalGraph, parts: Sequence[LaidOut], stages: Stages
) -> tuple[list[Box], list[Output]]:
    """The boxings that take what the step returns to all ranks, and the outputs."""
    target = stages.everywhere()
    found: dict[str, tuple[Output, Value]] = {}
    for part in parts:
        for node in part.graph.of_kind(Output):
            found[node.key] = node, part.graph.values[node.value.name]
    sent: dict[str, Box] = {}
    outputs = []
    for key in (node.key for node in graph.of_kind(Output)):
        node, value = found[key]
        if set(layout_of(value).placement.ranks) != set(target.placement.ranks):
            output = replace(value, name=f"{value.name}.out", layout=target)
            box = sent.setdefault(value.name, Box(Ref(value.name), output, f"output {key}"))
            node = replace(node, value=Ref(box.output.name))
        outputs.append(node)
    return list(sent.values()), outputs
