"""The exchanges of a step between ranks, each with its group, by what it is for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias, final

from weft.boxing import EXCHANGES, BoxingStep, steps
from weft.boxing.halo import Halo
from weft.compiler.local.localize import node_phases
from weft.compiler.pipeline import Compiled
from weft.compiler.signatures import graph_halos
from weft.compiler.training.gradients import passed_to_gradients
from weft.ir.logical import Box, Call, Input, LogicalGraph, Node, Output, Update, Value
from weft.traces.events import stars
from weft.units import ITEM_SIZE, Bytes

Group: TypeAlias = Literal[
    "gradients of parameters",
    "parameters gathered",
    "buffers",
    "batch",
    "between stages",
    "activations",
    "gradients of activations",
    "border rows",
    "losses, norms, results",
]


@final
@dataclass(frozen=True)
class Exchanged:
    """One exchange of a step, or as many as there are micro-batches.

    Attributes:
        group: what for.
        kinds: what runs, one after another ("reduce_scatter", "all_gather"); "halo" for border
            rows.
        bytes: that cross between ranks in a step.
        times: the number of its runs in a step.
        ranks: the number that take part.
        text: what of, and for whom, with the user's lines; alike for repeated blocks.
        sent: the steps of boxing that exchange; none of border rows.
        shape: of the whole tensor.
        dtype: of it.
        halo: the exchange of border rows; None of others.
    """

    group: Group
    kinds: tuple[str, ...]
    bytes: Bytes
    times: int
    ranks: int
    text: str
    sent: tuple[BoxingStep, ...]
    shape: tuple[int, ...]
    dtype: str
    halo: Halo | None = None


def exchanges(compiled: Compiled) -> Iterator[Exchanged]:
    """All exchanges between ranks, in the order of the graph; border rows at the end."""
    graph = compiled.graph
    loop, passed = graph.loop, passed_to_gradients(graph)
    phases = node_phases(graph, compiled.stages.homes)
    for node, phase in zip(graph.nodes, phases, strict=True):
        if isinstance(node, Box):
            value = graph.values[node.input.name]
            source, target = value.laid, node.output.laid
            chain = steps(source, target, value.shape, ITEM_SIZE[value.dtype])
            sent = [step for step in chain if step.kind in EXCHANGES and step.bytes]
            times = graph.micro_batches if node.output.name in loop else 1
            if sent:
                made = _named(graph, graph.values[node.input.name])
                cause = _behind_hints(graph, node) or (stars(node.cause) if node.cause else "")
                yield Exchanged(
                    _group(graph, node, passed, phase.kind == "forward"),
                    tuple(step.kind for step in sent),
                    Bytes(times * sum(step.bytes for step in sent)),
                    times,
                    len({*source.placement.ranks, *target.placement.ranks}),
                    f"{sent[0].kind} of {made}{f', wanted by {cause}' if cause else ''}",
                    tuple(sent),
                    value.shape,
                    value.dtype,
                )
    for halo, reader in graph_halos(graph):
        times = graph.micro_batches if halo.value.name in loop else 1
        text = f"halo of {_named(graph, halo.value)}, wanted by {_described(reader)}"
        ranks = sum(map(len, halo.groups))
        moved = Bytes(times * halo.total)
        shape, dtype = halo.value.shape, halo.value.dtype
        yield Exchanged("border rows", ("halo",), moved, times, ranks, text, (), shape, dtype, halo)


def _group(graph: LogicalGraph, node: Box, passed: frozenset[str], forward: bool) -> Group:
    value = graph.values[node.input.name]
    origin = _origin(graph, node)
    if node.output.name in passed:
        return "gradients of parameters"
    if isinstance(origin, Input) and origin.role in ("parameter", "state"):
        return "parameters gathered"
    if isinstance(origin, Input) and origin.role == "batch":
        return "batch"
    if isinstance(origin, Input):
        return "buffers"
    if prod(value.shape) == 1 or _for_caller(graph, node):
        return "losses, norms, results"
    if value.laid.placement != node.output.laid.placement:
        return "between stages"
    return "activations" if forward else "gradients of activations"


def _origin(graph: LogicalGraph, node: Node) -> Node:
    """The node that a boxing takes its value from, by way of casts, views and parts of it: ops of one operand."""
    while isinstance(node, Box) or (
        isinstance(node, Call) and (len(node.operands) == 1 and node.op.split(".")[1] in _PASSING)
    ):
        name = node.input.name if isinstance(node, Box) else node.operands[0]
        node = graph.producers[name]
    return node


# Ops that change no element of their operand.
_PASSING = frozenset(
    (
        *("hint", "take", "_to_copy", "convert_element_type", "alias", "clone", "detach"),
        *("select", "slice", "view", "_unsafe_view", "reshape", "t", "transpose", "permute"),
        *("expand", "unsqueeze", "squeeze"),
    )
)


def _for_caller(graph: LogicalGraph, node: Box) -> bool:
    """True if only the caller reads the value."""
    readers = graph.users[node.output.name]
    return all(
        isinstance(one, Output) or (isinstance(one, Box) and _for_caller(graph, one))
        for one in readers
    )


def _behind_hints(graph: LogicalGraph, node: Box) -> str:
    """The reader behind hints by which the compiler says how a parameter or its gradient is stored; "" without."""
    name, reader = node.output.name, _reader(graph, node.output.name)
    while isinstance(reader, Box) or (
        isinstance(reader, Call) and reader.hint is not None and reader.hint.stored is not None
    ):
        (made,) = (reader.output,) if isinstance(reader, Box) else filter(None, reader.outputs)
        name, reader = made.name, _reader(graph, made.name)
    if reader is None or name == node.output.name:
        return ""
    if isinstance(reader, Update):
        target = graph.producers[reader.target.name]
        key = target.key if isinstance(target, Input) else reader.target.name
        return f"update {reader.rule} of {stars(key)}"
    return _described(reader)


def _reader(graph: LogicalGraph, name: str) -> Call | Box | Update | None:
    readers = (one for one in graph.users[name] if isinstance(one, Call | Box | Update))
    return next(readers, None)


def _named(graph: LogicalGraph, value: Value) -> str:
    """A value by the input or the call that makes it."""
    origin = _origin(graph, graph.producers[value.name])
    if isinstance(origin, Input):
        return f"{origin.role} {stars(origin.key)}"
    maker = graph.producers[value.name]
    while isinstance(maker, Box):
        maker = graph.producers[maker.input.name]
    return f"{_described(maker)}, {value.dtype}{list(value.shape)}"


def _described(node: Node) -> str:
    if not isinstance(node, Call):
        return ""
    return f"{node.op} at {stars(str(node.location))}" if node.location else node.op
