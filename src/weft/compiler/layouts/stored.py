"""Parameters that are stored in shards: deduced as if they were not, then stored so.

Where a parameter lies in shards along an axis, it is whole where it is used (`weft.compiler.training.zero`).
So deduction runs twice: first as if the parameters were whole, with hints that say so; everything
then keeps its layout along that axis, but for the parameters, what is made of them before they are
whole, and the gradients on their way to the updates. The plan is thereby that of whole parameters
with their storage changed: no price of theirs can move an activation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from weft.compiler.calls import operand_names
from weft.compiler.hints import Hints
from weft.compiler.layouts.intent import gradients, measures, passed_on
from weft.compiler.training.gathers import HINT, TAKE
from weft.ir.logical import Call, Input, LogicalGraph, Node
from weft.ir.nodes import node_outputs
from weft.layout import Broadcast


def as_whole(graph: LogicalGraph, hints: Hints) -> tuple[LogicalGraph, Hints]:
    """The graph and its hints as they are where no parameter is stored in shards.

    Takes of a shard become takes of the whole, and what makes gradients shards leaves their layout
    free.
    """
    inputs = {
        key: tuple(
            Broadcast() if axis == hints.stored.get(key) else sbp for axis, sbp in enumerate(sbps)
        )
        for key, sbps in hints.inputs.items()
    }
    nodes = (_as_whole(node) if is_storage(node) else node for node in graph.nodes)
    return graph.with_nodes(nodes), Hints(inputs, hints.stored)


def is_storage(node: Node) -> bool:
    """Whether a call says how a parameter or its gradient is stored, or that it is whole from there on."""
    return isinstance(node, Call) and node.op in (HINT, TAKE) and len(node.args) > 2


def _as_whole(node: Node) -> Node:
    assert isinstance(node, Call)
    source, text, axis, *rest = node.args
    instead = "B" if node.op == TAKE or _sbp_text(text, axis) == "B" else "*"
    parts = str(text).split(",")
    parts[axis if len(parts) > 1 else 0] = instead  # type: ignore[index]
    return replace(node, args=(source, ",".join(parts), axis, *rest))


def _sbp_text(text: object, axis: object) -> str:
    parts = str(text).split(",")
    return parts[int(str(axis)) if len(parts) > 1 else 0].strip()


@dataclass(frozen=True)
class Storage:
    """What may lie otherwise along an axis than where parameters are whole.

    Attributes:
        made: values that may be made otherwise.
        read: values that may be boxed otherwise for their readers; those that are made as before
            are gradients as the backward leaves them.
    """

    made: frozenset[str]
    read: frozenset[str]


def storage(graph: LogicalGraph, stored: Mapping[str, int], axis: int) -> Storage:
    """What may lie otherwise along `axis` than where parameters are whole.

    Args:
        graph: with the takes and hints of `weft.compiler.training.zero`.
        stored: the axis of the shards, for the key of each parameter that is stored in some.
        axis: one of them.
    """
    inputs = [node for node in graph.of_kind(Input) if node.role == "parameter"]
    names = {node.value.name: node.key for node in inputs if stored.get(node.key) == axis}
    shards, found = frozenset(_shards(graph, names)), gradients(graph, names)
    return Storage(shards.union(_passed_on(graph, found)), shards.union(found))


def _shards(graph: LogicalGraph, parameters: Mapping[str, str]) -> Iterator[str]:
    """Parameters and what is made of their shards, up to where they are whole."""
    found = set(parameters)
    for node in graph.of_kind(Call):
        names = operand_names(node)
        if len(names) == 1 and names[0] in found and not _makes_whole(node):
            found.update(value.name for value in node_outputs(node))
    yield from found


def _makes_whole(node: Call) -> bool:
    return node.op == HINT and is_storage(node) and _sbp_text(*node.args[1:3]) == "B"


def _passed_on(graph: LogicalGraph, found: Mapping[str, str]) -> Iterator[str]:
    """Gradients that were gradients before, in another form, and what only takes a number from them."""
    yield from (name for name in found if passed_on(graph, name, found))
    for name in found:
        for node in graph.users[name]:
            if measures(node):
                yield from (value.name for value in node_outputs(node))
