"""Cut a graph by stage: one graph per stage, with values from other stages as free inputs.

Before: a graph whose calls have stages. After: one graph for each stage that has nodes. A value
`x` that another stage makes is called `x.at1` in stage 1, an input that nothing but its producer's
layout fixes (see `join_stages`, which turns it into boxing). An entry of the batch or a constant is
an input of its own, under its own key, in every stage whose ranks have it not yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from weft.cached import cached_property
from weft.compiler.context import Stages
from weft.compiler.layouts.box import describe, moved_bytes
from weft.compiler.layouts.intent import gradients
from weft.ir.logical import (
    ROLES,
    Box,
    Call,
    Input,
    LogicalGraph,
    Node,
    Output,
    Phase,
    Update,
    Value,
)
from weft.ir.nodes import Sent, renamed

# Made again in every stage that reads them: they read nothing.
_MADE_ANYWHERE = ("aten.arange", "aten.full.", "aten.ones.", "aten.zeros.", "aten.scalar_tensor")


@final
@dataclass(frozen=True)
class StageGraph:
    """One stage's part of a graph.

    Attributes:
        crossing: for each input that another stage makes, the value that it is: name here -> name
            there.
        leaving: names of values that its calls make for other stages, but for parameters' gradients, which
            may be reduced anywhere.
    """

    stage: int
    graph: LogicalGraph
    crossing: Mapping[str, str]
    leaving: frozenset[str] = frozenset()


def cut_stages(graph: LogicalGraph, stages: Stages) -> tuple[StageGraph, ...]:
    """The graphs of the stages that have nodes, in order."""
    owners = _owners(graph, stages)
    found: list[StageGraph] = []
    # For each entry of the batch and constant, the stages that have it as an input of their own.
    fed: dict[str, list[int]] = {}
    for stage in range(len(stages.placements)):
        part = _Part(graph, stages, owners, stage, fed).cut()
        if part.graph.nodes:
            found.append(part)
    sent = {name for part in found for name in part.crossing.values()}
    parameters = {node.value.name: "" for node in graph.of_kind(Input) if node.role == "parameter"}
    sent -= gradients(graph, parameters).keys()
    made = [{v.name for node in part.graph.of_kind(Call) for v in node.makes} for part in found]
    return tuple(
        replace(part, leaving=frozenset(own & sent)) for part, own in zip(found, made, strict=True)
    )


def copy_sources(graph: LogicalGraph) -> LogicalGraph:
    """The graph with almost free values computed in every stage that reads them.

    These are constants such as positions, and one micro-batch's part of an entry of the batch.
    """
    names: dict[tuple[str, int], str] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        if isinstance(node, Call):
            here = {used: names.get((used, node.phase.stage), used) for used in node.uses}
            nodes.append(renamed(node, here))
            makers = [graph.producers[name] for name in node.uses]
            if not (
                all(isinstance(maker, Input) and maker.cut for maker in makers)
                and (node.varyings if makers else node.op.startswith(_MADE_ANYWHERE))
            ):
                continue
            readers = (reader for value in node.makes for reader in graph.users[value.name])
            stages = {reader.phase.stage for reader in readers if isinstance(reader, Call)}
            for stage in sorted(stages - {node.phase.stage}):
                outputs = tuple(
                    v and replace(v, name=_name_at(v.name, stage)) for v in node.outputs
                )
                copy = node.changed(outputs=outputs, phase=Phase(stage, node.phase.kind))
                nodes.append(copy)
                for value, made in zip(node.makes, copy.makes, strict=True):
                    names[value.name, stage] = made.name
        else:
            nodes.append(node)
    return replace(graph, nodes=tuple(nodes))


def _owners(graph: LogicalGraph, stages: Stages) -> dict[str, int]:
    """The stage that has each value: where it is made, or where a variable lives.

    An entry of the batch or a constant is owned by the first stage that reads it, an update where its
    target lives.
    """
    found: dict[str, int] = {}
    keys = {node.value.name: node.key for node in graph.of_kind(Input)}

    def stage_of(reader: Node) -> int | None:
        if isinstance(reader, Update):
            return stages.homes.get(keys[reader.target.name], 0)
        return reader.phase.stage if isinstance(reader, Call) else None

    for node in graph.nodes:
        match node:
            case Input(value=value, role="parameter" | "buffer", key=key):
                found[value.name] = stages.homes.get(key, 0)
            case Input(value=value, role="batch" | "constant"):
                readers = [stage_of(reader) for reader in graph.users[value.name]]
                found[value.name] = min((x for x in readers if x is not None), default=0)
            case Call():
                found |= {value.name: node.phase.stage for value in node.makes}
    for update in graph.of_kind(Update):
        home = found.setdefault(update.target.name, 0)
        found |= {state.name: home for state in update.states}
    return found


def _name_at(name: str, stage: int) -> str:
    return f"{name}.at{stage}"


@final
@dataclass
class _Part:
    """One stage's nodes as they are cut out; notes in `fed` the leaves that it gets."""

    graph: LogicalGraph
    stages: Stages
    owners: Mapping[str, int]
    stage: int
    fed: dict[str, list[int]]

    def cut(self) -> StageGraph:
        nodes = [node for node in self.graph.nodes if self._is_here(node)]
        away = {
            name: _name_at(name, self.stage)
            for node in nodes
            for name in node.uses
            if self.owners.get(name, 0) != self.stage
        }
        # A leaf comes from the user where none of the ranks of this stage has it already.
        placements = self.stages.placements
        here = set(placements[self.stage].ranks)
        fed = {
            name: self.graph.producers[name]
            for name in away
            if self._is_leaf(name)
            and all(here.isdisjoint(placements[x].ranks) for x in self.fed.get(name, ()))
        }
        own = [
            replace(leaf, value=replace(leaf.value, name=away[name]))
            for name, leaf in fed.items()
            if isinstance(leaf, Input)
        ]
        crossing = {away[name]: name for name in away if name not in fed}
        for name in [*away, *(n.value.name for n in nodes if isinstance(n, Input))]:
            if self._is_leaf(name) and away.get(name) not in crossing:
                self.fed.setdefault(name, []).append(self.stage)
        free = [self._free(here, name) for here, name in crossing.items()]
        nodes = [*free, *own, *(renamed(node, away) for node in nodes)]
        graph = replace(self.graph, nodes=tuple(nodes))
        return StageGraph(self.stage, graph, crossing)

    def _is_here(self, node: Node) -> bool:
        match node:
            case Input(value=value):
                return self.owners.get(value.name, 0) == self.stage
            case Call(phase=phase):
                return phase.stage == self.stage
            case Update(target=ref) | Output(value=ref):
                return self.owners[ref.name] == self.stage
        return False

    def _is_leaf(self, name: str) -> bool:
        producer = self.graph.producers[name]
        return isinstance(producer, Input) and producer.role in ("batch", "constant")

    def _free(self, here: str, name: str) -> Input:
        """A parameter stays one, so that its users are charged as the strategy means it; all else is like a batch."""
        value, producer = self.graph.values[name], self.graph.producers[name]
        role = producer.role if isinstance(producer, Input) else "batch"
        role = role if role in ("parameter", "buffer") else "batch"
        cut = isinstance(producer, Input) and producer.cut
        sent: Sent = "each" if name in self.graph.loop else "once"
        return Input(Value(here, value.shape, value.dtype), role, here, cut=cut, sent=sent)


# Stages with layouts, joined by boxing between their placements. Between a value that a stage makes and the
# stages that read it there is one boxing, right after the value is made; it starts from a layout in which the value
# is there anyway. Results of the step go to all ranks of all stages.


@final
@dataclass(frozen=True)
class LaidOut:
    """One stage's part of the graph, with layouts and boxing.

    Attributes:
        crossing: for each input that another stage makes: name here -> name there.
    """

    stage: int
    crossing: Mapping[str, str]
    graph: LogicalGraph

    def standing(self, name: str) -> list[Value]:
        """A value in its layouts within this stage: as made, then boxed.

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
    """The stages as one graph with layouts, in the order of `graph`, which was cut into them; the only one as it is."""
    if len(stages.placements) == 1:
        return parts[0].graph
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
    found = {node.target.name: node for part in parts for node in part.graph.of_kind(Update)}
    updates = [found[node.target.name] for node in graph.of_kind(Update)]
    return replace(graph, nodes=(*nodes, *sent, *updates, *outputs))


def _arrivals(parts: Sequence[LaidOut]) -> dict[str, list[Box]]:
    found: dict[str, list[Box]] = {}
    for part in parts:
        for here, there in part.crossing.items():
            output = part.graph.values[here]
            values = [value for other in parts for value in other.standing(there)]
            source = min(values, key=lambda value: moved_bytes(value, value.laid, output.laid))
            reader = part.graph.users[here][0]
            cause = reader.cause if isinstance(reader, Box) else describe(reader, part.graph)
            found.setdefault(source.name, []).append(Box(source.ref, output, cause))
    return found


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
