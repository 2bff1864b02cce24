"""What of a graph is made once per micro-batch, and what once a step."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from weft.ir.logical import Box, Call, Input, LogicalGraph, Node, Varying, node_uses
from weft.ir.nodes import OVER_STEP

SELECT = "aten.select.int"


def loop_values(graph: LogicalGraph, coming: Iterable[str] = ()) -> frozenset[str]:
    """The values that are made once per micro-batch; all others are made once a step.

    Args:
        graph: the step, or one stage of it.
        coming: inputs that come once per micro-batch, from other stages.
    """
    found: set[str] = set(coming)
    for node in graph.nodes:
        if runs_in_loop(node, found) and not _leaves_loop(node):
            match node:
                case Call(outputs=outputs):
                    found.update(value.name for value in outputs if value is not None)
                case Box(output=output):
                    found.add(output.name)
    return frozenset(found)


def runs_in_loop(node: Node, loop: frozenset[str] | set[str]) -> bool:
    """Whether a node runs once per micro-batch, where `loop` holds the loop values before it."""
    if isinstance(node, Call) and node.varyings:
        return True
    return not loop.isdisjoint(node_uses(node))


def at_micro_batch(arg: Any, micro: int) -> Any:
    """An argument tree as it is in one micro-batch."""
    if isinstance(arg, Varying):
        return arg.values[micro]
    if isinstance(arg, tuple):
        return tuple(at_micro_batch(part, micro) for part in arg)
    return arg


def joined(parts: tuple[Any, ...]) -> Any:
    """One argument tree from those of all micro-batches: `Varying` where leaves differ.

    All parts must have the same tuples in them.
    """
    if all(part == parts[0] and type(part) is type(parts[0]) for part in parts):
        return parts[0]
    if all(isinstance(part, tuple) and len(part) == len(parts[0]) for part in parts):
        return tuple(joined(leaves) for leaves in zip(*parts, strict=True))
    return Varying(parts)


def cut_leaves(graph: LogicalGraph) -> frozenset[str]:
    """The inputs that hold a leaf of the batch as (micro-batches, part of the batch, ...)."""
    found: set[str] = set()
    for node in graph.of_kind(Call):
        if node.op == SELECT and isinstance(node.args[2], Varying):
            producer = graph.producers[node_uses(node)[0]]
            while isinstance(producer, Box):
                producer = graph.producers[producer.input.name]
            if isinstance(producer, Input) and producer.role == "batch":
                found.add(producer.value.name)
    return frozenset(found)


def _leaves_loop(node: Node) -> bool:
    return isinstance(node, Call) and node.op in OVER_STEP
