"""The gradients that optimizers read, for passes that put something between the two."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import final

from weft.compiler.context import Context
from weft.compiler.layouts.intent import measures
from weft.ir.logical import (
    Arg,
    Box,
    Call,
    Input,
    LogicalGraph,
    Node,
    Output,
    Phase,
    Ref,
    Update,
    Value,
)
from weft.ops.call import Token

_SUMS = ("aten.add.Tensor",)
# Linear in the first operand, and it alone is a gradient.
_OF_FIRST = ("weft.scale", "aten.embedding_dense_backward.default")


@final
@dataclass(frozen=True)
class Gradient:
    """The source of an optimizer's update."""

    value: Value
    target: str
    phase: Phase


def gradients(graph: LogicalGraph, homes: Mapping[str, int] | None = None) -> tuple[Gradient, ...]:
    """The gradients of all parameters that an optimizer updates, in the order of the updates.

    Args:
        homes: the stages of parameters by key, where fed gradients are read.
    """
    found = []
    for update in filter(by_optimizer, graph.of_kind(Update)):
        maker, target = graph.producers[update.source.name], graph.producers[update.target.name]
        stage = homes.get(target.key, 0) if homes and isinstance(target, Input) else 0
        if isinstance(maker, Call):
            stage = maker.phase.stage
        value = graph.values[update.source.name]
        found.append(Gradient(value, update.target.name, Phase(stage, "backward")))
    return tuple(found)


def by_optimizer(update: Update) -> bool:
    """True if an optimizer runs this update; others copy a new version of a buffer."""
    return update.rule != "copy"


def passed_to_gradients(graph: LogicalGraph) -> frozenset[str]:
    """The values that are gradients of parameters, or become them, and are read for nothing else.

    These values go to an update through boxing, ops of one operand, sums, and factors of the step.
    """
    found = {update.source.name for update in graph.of_kind(Update) if by_optimizer(update)}
    for node in reversed(graph.nodes):
        if any(value.name in found for value in node.makes):
            for name in _passed(graph, node):
                readers = [one for one in graph.users[name] if not measures(one)]
                updates = [one for one in readers if isinstance(one, Update)]
                made = [one.makes for one in readers if not isinstance(one, Update)]
                if all(map(by_optimizer, updates)) and all(
                    any(value.name in found for value in values) for values in made
                ):
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


@final
@dataclass(slots=True)
class Scalars:
    """Calls on numbers of the step, such as norms, and on gradients, at the end of the backward."""

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


# The norm of all gradients together, whatever their layouts and stages: clip by it, or tell it.
#
# Before: updates by gradients. After: by gradients times `min(1, max_norm / (norm + 1e-6))`, as
# `torch.nn.utils.clip_grad_norm_` does it between backward and the optimizer's step; the metric
# "grad_norm" is the norm before clipping. The squares of a split gradient are summed where its shards
# lie; only numbers are sent.
#
# Gradients are divided by the loss scale of float16 first; a step with one that is not finite, on any rank
# of any stage, updates nothing and halves the scale.


# Prefix of the keys of outputs that the loss function did not return.
METRIC = "metric:"


def clip_norm(graph: LogicalGraph, context: Context) -> LogicalGraph:
    """Let optimizers read gradients that are scaled to a global norm of at most `Options.clip_norm`.

    With the metric "grad_norm", the norm is one more output.
    """
    max_norm = context.options.clip_norm
    found = gradients(graph, context.stages.homes)
    measured = "grad_norm" in context.options.metrics
    if not found or (max_norm is None and not measured):
        return graph
    double = any(each.value.dtype in ("float64", "complex128") for each in found)
    new = Scalars("clip", "float64" if double else "float32")
    dtype = Token("dtype", new.dtype)
    squares = []
    for each in found:
        args = (each.value.ref, dtype)
        square = new.call("weft.square_sum", args, each.value.name, each.phase)
        squares.append((square, each.phase))
    total = new.total("aten.sum.default", squares, "square")
    first = Phase(min(each.phase.stage for each in found), "backward")
    norm = new.call("aten.sqrt.default", (total,), "norm", first) if measured else None
    sources = {}
    if max_norm is not None:
        factor = new.call("weft.clip_factor", (total, max_norm), "factor", first)
        sources = {each.target: new.scaled(each, factor) for each in found}
    graph = with_sources(graph, new.calls, sources)
    if norm is None:
        return graph
    return replace(graph, nodes=(*graph.nodes, Output(norm, f"{METRIC}grad_norm")))


def unscale(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """Divide gradients by the loss scale, if there is one, and skip updates when one overflows."""
    if SCALE not in graph.values:
        return graph
    found = gradients(graph)
    new = Scalars("scaled")
    flags = [
        (
            new.call("weft.nonfinite", (each.value.ref,), each.value.name, each.phase),
            each.phase,
        )
        for each in found
    ]
    overflow = new.total("aten.amax.default", flags, "overflow")
    first = Phase(min(each.phase.stage for each in found), "backward")
    inverse = new.call("aten.reciprocal.default", (graph.values[SCALE].ref,), "inverse", first)
    sources = {each.target: new.scaled(each, inverse) for each in found}
    made = (Value("scaled.scale", (), "float32"), Value("scaled.growth_tracker", (), "int32"))
    args = (graph.values[SCALE].ref, graph.values[TRACKER].ref, overflow)
    new.calls.append(Call.of("weft.next_scale", args, made, phase=first))
    nodes = [
        replace(node, skip=overflow) if isinstance(node, Update) and by_optimizer(node) else node
        for node in with_sources(graph, new.calls, sources).nodes
    ]
    copies = [
        Update("copy", Ref(key), value.ref)
        for key, value in zip((SCALE, TRACKER), made, strict=True)
    ]
    end = next((i for i, node in enumerate(nodes) if isinstance(node, Output)), len(nodes))
    return replace(graph, nodes=(*nodes[:end], *copies, *nodes[end:]))


# Dynamic loss scaling for float16, as `torch.amp.GradScaler` does it.
#
# The gradient of the loss starts from the scale, a state of the program, so that small gradients do not vanish;
# `unscale` divides by it before the optimizers run. Before: as captured, it starts from a seed. After: from the
# scale.


SEED = "weft.loss_seed"
# Keys of the states, and what they start with.
SCALE, TRACKER = "grad_scaler.scale", "grad_scaler.growth_tracker"
FIRST_VALUES = {SCALE: 65536.0, TRACKER: 0}


def scale_loss(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """Let gradients start from the scale where, as captured for float16, they start from a seed."""
    if not any(call.op == SEED for call in graph.of_kind(Call)):
        return graph
    scale = Value(SCALE, (), "float32")
    states = (
        Input(scale, "state", SCALE),
        Input(Value(TRACKER, (), "int32"), "state", TRACKER),
    )
    inputs = sum(isinstance(node, Input) for node in graph.nodes)
    nodes: list[Node] = [*graph.nodes[:inputs], *states]
    for node in graph.nodes[inputs:]:
        if isinstance(node, Call) and node.op == SEED:
            ones = tuple(
                value and replace(value, name=f"{value.name}.ones") for value in node.outputs
            )
            nodes.append(node.changed(op="aten.ones_like.default", outputs=ones))
            args = (ones[0].ref, scale.ref)  # type: ignore[union-attr]
            node = node.changed(op="weft.scale", args=args)
        nodes.append(node)
    return replace(graph, nodes=tuple(nodes))
