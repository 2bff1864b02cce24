"""Stages that are laid out, joined by boxing between their placements.

Between a value that a stage makes and the stages that read it stands one boxing, right after the value is made; it
starts from a layout in which the value stands there anyway. What the step returns goes to all ranks of all
stages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from weft.boxing import steps
from weft.cached import cached_property
from weft.compiler.context import Stages
from weft.compiler.layouts.box import describe
from weft.ir.logical import ROLES, Box, Call, Input, LogicalGraph, Node, Output, Update, Value
from weft.layout import Layout
from weft.units import ITEM_SIZE


@final
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
        kept = (v.name for v in call.makes if v.name in there[call.phase.stage])
        name = next(kept, None)
        while name is not None and name not in made:
            for node in waiting[call.phase.stage].popleft():
                names = [value.name for value in node.makes]
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
            source = min(values, key=lambda value: _moved(value, output.laid))
            reader = part.graph.users[here][0]
            cause = reader.cause if isinstance(reader, Box) else describe(reader, part.graph)
            found.setdefault(source.name, []).append(Box(source.ref, output, cause))
    return found


def _moved(value: Value, layout: Layout) -> int:
    """Bytes that boxing `value` to `layout` moves."""
    chain = steps(value.laid, layout, value.shape, ITEM_SIZE[value.dtype])
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
        if set(value.laid.placement.ranks) != set(target.placement.ranks):
            output = replace(value, name=f"{value.name}.out", layout=target)
            box = sent.setdefault(value.name, Box(value.ref, output, f"output {key}"))
            node = replace(node, value=box.output.ref)
        outputs.append(node)
    return list(sent.values()), outputs
