"""Insert boxing wherever a node wants a value in another layout than its producer gives.

Before: a graph without layouts, and an `Assignment`. After: every value has a layout, and every
node reads its operands in the layouts that the assignment names. Consumers that want the same
layout share one boxing.

`deduce` makes the assignment: one signature per call, one SBP per input, the cheapest in total under the user's hints.
A sum of costs of single choices (work) and of pairs of choices (boxing on an edge), minimised by variable elimination,
not op by op. A grid of several axes is solved axis by axis, each with the others fixed, until nothing changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import final

from weft.boxing import steps
from weft.compiler.assignment import Assignment
from weft.compiler.hints import Hints, check_hints
from weft.compiler.layouts.coordinate_descent import choose_again, descend
from weft.compiler.layouts.intent import as_if_unsharded, storage
from weft.compiler.layouts.options import Known, LayoutChoice
from weft.compiler.layouts.problem import Problem, build
from weft.hardware import CostModel
from weft.ir.logical import Box, Call, Input, LogicalGraph, Node, Output, Ref, Update, Value
from weft.ir.nodes import renamed
from weft.layout import Layout, Placement, broadcast_layout
from weft.units import ITEM_SIZE


def box(graph: LogicalGraph, assignment: Assignment) -> LogicalGraph:
    """The graph with layouts on all values and `Box` nodes between layouts that differ.

    The boxing of a computed value is right after its producer, so that communication starts early; the boxing of an
    input is right before its first reader, so that a gathered copy lives only briefly.
    """
    boxings = _Boxings(graph, assignment)
    nodes: list[Node] = []
    tail: list[Node] = []
    for index, node in enumerate(graph.nodes):
        renamed = boxings.rewire(index, node)
        late = boxings.due.get(index, ())
        if isinstance(node, Update | Output):
            tail.append(renamed)
            nodes.extend(late)
        else:
            nodes.extend(late)
            nodes.append(renamed)
            if isinstance(renamed, Call):
                made = (boxings.wanted.get(value.name, {}) for value in renamed.makes)
                nodes.extend(boxing for each in made for boxing in each.values())
    return replace(graph, nodes=tuple(nodes + tail))


@final
@dataclass
class _Boxings:
    """All boxings of a graph, found before the graph is rebuilt.

    Attributes:
        wanted: for each value, the boxings of it by target layout, in the order of their first
            readers.
    """

    graph: LogicalGraph
    assignment: Assignment
    wanted: dict[str, dict[Layout, Box]] = field(default_factory=dict)
    due: dict[int, list[Box]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for index, node in enumerate(self.graph.nodes):
            for name, layout in self._operands(index, node):
                if layout != self.assignment.values[name]:
                    self._want(index, node, name, layout)

    def rewire(self, index: int, node: Node) -> Node:
        """`node` with layouts on its outputs, reading the boxed values where it needs them."""
        names = {
            name: self.wanted[name][layout].output.name
            for name, layout in self._operands(index, node)
            if layout in self.wanted.get(name, {})
        }
        layouts = self.assignment.values
        match node:
            case Input(value=value):
                node = replace(node, value=replace(value, layout=layouts[value.name]))
            case Call(outputs=outputs):
                laid = [v and replace(v, layout=layouts[v.name]) for v in outputs]
                node = node.changed(outputs=tuple(laid))
        return renamed(node, names)

    def _operands(self, index: int, node: Node) -> Iterable[tuple[str, Layout]]:
        names = tuple(dict.fromkeys(node.uses))
        return zip(names, self.assignment.operands.get(index, ()), strict=True)

    def _want(self, index: int, node: Node, name: str, layout: Layout) -> None:
        boxings = self.wanted.setdefault(name, {})
        if layout in boxings:
            return
        value = self.graph.values[name]
        shared, start = self.assignment.shared.get(name), name
        if shared not in (None, layout) and moved_bytes(value, shared, layout) <= moved_bytes(
            value, self.assignment.values[name], layout
        ):
            self._want(index, node, name, shared)
            start = boxings[shared].output.name
        output = Value(f"{name}.box{len(boxings)}", value.shape, value.dtype, layout)
        boxings[layout] = Box(Ref(start), output, describe(node, self.graph))
        if isinstance(self.graph.producers[name], Input):
            self.due.setdefault(index, []).append(boxings[layout])


def moved_bytes(value: Value, source: Layout, target: Layout) -> int:
    """Bytes that boxing `value` from one layout to another moves, over all ranks."""
    return sum(step.bytes for step in steps(source, target, value.shape, ITEM_SIZE[value.dtype]))


def describe(node: Node, graph: LogicalGraph) -> str:
    """The reader that causes a boxing, in words."""
    match node:
        case Call(op=op, location=location):
            return f"{op} at {location}" if location else op
        case Update(rule=rule, target=target):
            producer = graph.producers[target.name]
            return (
                f"update {rule} of {producer.key if isinstance(producer, Input) else target.name}"
            )
        case Output(key=key):
            return f"output {key}"
    return ""


def deduce(
    graph: LogicalGraph,
    hints: Hints,
    placement: Placement,
    cost_model: CostModel = CostModel(),  # noqa: B008 (frozen)
    known: Known | None = None,
) -> Assignment:
    """Choose the layouts of all values and operands of `graph` on `placement`.

    Hints are fixed points. Free inputs: parameters and buffers are Broadcast or split on any dimension (Broadcast
    when that is as cheap), batch entries Broadcast or split on their first, constants Broadcast; an optimizer's state
    follows its parameter. An update runs in the layout of its target; outputs are Broadcast. A variable stored in
    shards is laid out as if whole, and then sharded for storage (`deduce_stored`).

    Args:
        hints: what the user fixed.
        known: what other deductions on grids of this shape, with this cost model, remember.

    Raises:
        LayoutError: when a hint cannot hold.
        RuleError: when an op has no rule.
    """
    check_hints(graph, hints, placement)
    known = known or Known(placement.shape, cost_model)
    problem = build(*as_if_unsharded(graph, hints), placement)
    choice = descend(problem, known)
    if hints.stored:
        problem = build(graph, hints, placement)
        axes = sorted(set(hints.stored.values()))
        free = {axis: problem.of(storage(graph, hints.stored, axis)) for axis in axes}
        choice = choose_again(problem, known, choice, free)
    return _assignment(graph, placement, problem, choice)


def _assignment(
    graph: LogicalGraph, placement: Placement, problem: Problem, choice: LayoutChoice
) -> Assignment:
    def result(variable: int, slot: int) -> Layout:
        every = choice.signatures[variable]
        return Layout(placement, tuple(signature.results[slot] for signature in every))

    def operands(variable: int) -> tuple[Layout, ...]:
        every = choice.signatures[variable]
        by_operand = zip(*(signature.operands for signature in every), strict=True)
        return tuple(Layout(placement, sbps) for sbps in by_operand)

    def wanted(number: int, node: Node) -> tuple[Layout, ...]:
        if isinstance(node, Update):
            # Its source as its target lies, states as they are, a number whole.
            target, skip = values[node.target.name], node.skip and node.skip.name
            same = {ref.name for ref in node.states}
            return tuple(
                broadcast_layout(placement)
                if name == skip
                else values[name]
                if name in same
                else target
                for name in dict.fromkeys(node.uses)
            )
        return operands(problem.variable_of[number])

    values = {name: result(*made) for name, made in problem.maker_of.items()}
    readers = {
        number: wanted(number, node)
        for number, node in enumerate(graph.nodes)
        if isinstance(node, Call | Update | Output)
    }
    shared = {name: result(share, 0) for name, share in problem.share_of.items()}
    differing = {name: layout for name, layout in shared.items() if layout != values[name]}
    return Assignment(
        values, readers, differing, choice.cost, choice.bound, choice.exact, choice.broken
    )
