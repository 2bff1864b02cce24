"""The gradients that optimizers read, for passes that put something between the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import final

from weft.compiler.layouts.intent import measures
from weft.ir.logical import Arg, Box, Call, Input, LogicalGraph, Node, Phase, Ref, Update, Value

_SUMS = ("aten.add.Tensor",)
# Linear in the first operand, and it alone is a gradient.
_OF_FIRST = ("weft.scale", "aten.embedding_dense_backward.default")


@final
@dataclass(frozen=True)
class Gradient:
    """The source of an optimizer's update.

    Attributes:
        value: the gradient.
        target: the name of the parameter.
        phase: of the call that makes it.
    """

    value: Value
    target: str
    phase: Phase


def gradients(graph: LogicalGraph, homes: Mapping[str, int] | None = None) -> tuple[Gradient, ...]:
    """The gradients of all parameters that an optimizer updates, in the order of the updates.

    Args:
        graph: a step, or updates by gradients that are fed.
        homes: the stages of parameters by key, where fed gradients are read.
    """
    return tuple(
        Gradient(
            graph.values[update.source.name],
            update.target.name,
            _phase(graph, update, homes or {}),
        )
        for update in graph.of_kind(Update)
        if by_optimizer(update)
    )


def by_optimizer(update: Update) -> bool:
    """True where an optimizer runs this update; others copy a new version of a buffer."""
    return update.rule != "copy"


def passed_to_gradients(graph: LogicalGraph) -> frozenset[str]:
    """The values that are gradients of parameters, or become them, and are read for nothing else.

    That is what goes to an update through boxing, ops of one operand, sums, and factors of the step.
    """
    found = {update.source.name for update in graph.of_kind(Update) if by_optimizer(update)}
    for node in reversed(graph.nodes):
        if any(value.name in found for value in node.makes):
            for name in _passed(graph, node):
                readers = (one for one in graph.users[name] if not measures(one))
                if all(_leads_to(reader, found) for reader in readers):
                    found.add(name)
    return frozenset(found)


def _passed(graph: LogicalGraph, node: Node) -> tuple[str, ...]:
    """The operands that are gradients when the result is one."""
    names = tuple(dict.fromkeys(node.uses))
    if isinstance(node, Box):
        return names
    if not isinstance(node, Call) or len(node.outputs) != 1:
        return ()
    if node.op in _SUMS:
        return names
    first, made = names[:1], node.makes
    alone = len(names) == 1 and prod(graph.values[names[0]].shape) == prod(made[0].shape)
    return first if alone or node.op in _OF_FIRST else ()


def _leads_to(reader: Node, found: set[str]) -> bool:
    """True where a reader makes a gradient, or updates by one."""
    if isinstance(reader, Update):
        return by_optimizer(reader)
    return any(value.name in found for value in reader.makes)


def with_sources(
    graph: LogicalGraph, calls: Sequence[Call], sources: Mapping[str, str]
) -> LogicalGraph:
    """The graph with `calls` after all others, and other sources for the updates of some targets."""

    def read(node: Node) -> Node:
        if isinstance(node, Update) and node.target.name in sources:
            return replace(node, source=Ref(sources[node.target.name]))
        return node

    place = next(
        (number for number, node in enumerate(graph.nodes) if isinstance(node, Update)),
        len(graph.nodes),
    )
    return graph.with_nodes((*graph.nodes[:place], *calls, *map(read, graph.nodes[place:])))


def _phase(graph: LogicalGraph, update: Update, homes: Mapping[str, int]) -> Phase:
    maker, target = graph.producers[update.source.name], graph.producers[update.target.name]
    if isinstance(maker, Call):
        return Phase(maker.phase.stage, "backward")
    return Phase(homes.get(target.key, 0) if isinstance(target, Input) else 0, "backward")


@final
@dataclass
class Scalars:
    """Calls on numbers of the step, such as norms, and on gradients, at the end of the backward.

    Attributes:
        prefix: of the names of what they make.
        dtype: of the numbers.
        calls: those so far.
    """

    prefix: str
    dtype: str = "float32"
    calls: list[Call] = field(default_factory=list)

    def call(self, op: str, args: tuple[Arg, ...], name: str, phase: Phase) -> Ref:
        """One more number: `op(*args)`."""
        return self._add(op, args, Value(f"{self.prefix}.{name}", (), self.dtype), phase)

    def scaled(self, gradient: Gradient, factor: Ref) -> str:
        """The gradient times a number; the name of the product."""
        made = replace(gradient.value, name=f"{gradient.value.name}.{self.prefix}")
        args = (gradient.value.ref, factor)
        return self._add("weft.scale", args, made, gradient.phase).name

    def total(self, reduce: str, numbers: Sequence[tuple[Ref, Phase]], name: str) -> Ref:
        """All numbers as one: first those of each stage, where they are, then these in the first."""
        stages = {phase.stage: phase for _, phase in numbers}
        parts = [
            self._joined(
                reduce, [number for number, at in numbers if at.stage == stage], name, phase
            )
            for stage, phase in stages.items()
        ]
        return self._joined(reduce, parts, f"{name}.all", stages[min(stages)])

    def _joined(self, reduce: str, numbers: Sequence[Ref], name: str, phase: Phase) -> Ref:
        if len(numbers) == 1:
            return numbers[0]
        name = f"{self.prefix}.{name}{phase.stage}"
        stacked = Value(f"{name}.each", (len(numbers),), self.dtype)
        every = self._add("aten.stack.default", (tuple(numbers),), stacked, phase)
        return self._add(reduce, (every,), Value(name, (), self.dtype), phase)

    def _add(self, op: str, args: tuple[Arg, ...], made: Value, phase: Phase) -> Ref:
        self.calls.append(Call.of(op, args, (made,), phase=phase))
        return made.ref
