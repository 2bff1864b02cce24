"""The SBP signatures that a graph with layouts gives its calls, and the check that their rules allow them."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from math import prod
from typing import NamedTuple, final

from weft.boxing import BoxingStep, steps
from weft.boxing.halo import Halo, call_halos
from weft.compiler.hints import is_hint
from weft.errors import InternalError
from weft.hardware import CostModel
from weft.ir.logical import Box, Call, LogicalGraph
from weft.layout import Broadcast
from weft.ops import OpCall, Signature, localize, signatures_with_windows
from weft.ops.windows import slides_at, window_bytes
from weft.units import ITEM_SIZE, Bytes


def axis_signatures(graph: LogicalGraph, node: Call) -> Iterator[tuple[Signature, int]]:
    """For each axis of the grid, outermost first: the signature of `node` and the number of ranks."""
    operands = [graph.values[name].laid for name in node.operands]
    results = [None if value is None else value.laid for value in node.outputs]
    placement = next(layout for layout in (*operands, *results) if layout).placement
    for axis, parts in enumerate(placement.shape):
        before = tuple(layout.sbp[axis] for layout in operands)
        after = tuple(layout.sbp[axis] if layout else Broadcast() for layout in results)
        yield Signature(before, after), parts


def check_signatures(graph: LogicalGraph) -> LogicalGraph:
    """Return `graph` when the rule of every call allows the layouts around it.

    Raises:
        InternalError: naming the call, its signature and the axis.
    """
    checked: set[Hashable] = (
        set()
    )  # equal calls, such as those of repeated layers, are checked once
    for node in graph.of_kind(Call):
        if is_hint(node):
            continue
        call = node.first
        operands = tuple([graph.values[name].layout for name in node.operands])
        key = call, operands, tuple([value and value.layout for value in node.outputs])
        if key in checked:
            continue
        checked.add(key)
        for axis, (signature, parts) in enumerate(axis_signatures(graph, node)):
            if signature not in signatures_with_windows(call, parts, empty=True):
                raise InternalError(
                    f"{node.op} at {node.location}: no rule allows {signature} on axis {axis}"
                )
            # The largest shard stands for all: it is what deduction looked at.
            call = localize(call, signature, parts, 0)
    return graph


# The halos of a graph: exchanges of border rows before calls on windows (`weft.boxing.halo`), and their cost.
#
# The graph with layouts says that a convolution reads x in S(2) and gives S(2). The exchange is in
# the local programs as a `Transfer` right before its first reader. Calls that read the same windows of
# a value, such as a convolution and its backward, share one.


def halos(graph: LogicalGraph, node: Call) -> dict[str, Halo]:
    """The exchanges that a call needs, by the names of the values that it reads."""
    if not slides_at(node.op):
        return {}
    names = node.operands
    chosen = [signature for signature, _ in axis_signatures(graph, node)]
    values = [graph.values[name] for name in names]
    found = call_halos(node.first, chosen, values)
    return {names[number]: halo for number, halo in found.items()}


def graph_halos(graph: LogicalGraph) -> Iterator[tuple[Halo, Call]]:
    """Every exchange of a graph once, with its first reader."""
    seen = set()
    for node in graph.of_kind(Call):
        for halo in halos(graph, node).values():
            if (halo.value.name, halo.wanted) not in seen:
                seen.add((halo.value.name, halo.wanted))
                yield halo, node


def halo_cost(
    call: OpCall, signature: Signature, grid: tuple[int, ...], axis: int, model: CostModel
) -> float:
    """The cost of the exchanges before a call that is split along `axis` under `signature`.

    Args:
        call: with the shapes that it has along `axis` before it is split.
    """
    moved, exchanges = window_bytes(call, signature, grid[axis])
    groups = prod(grid) // grid[axis]
    return model.boxing(Bytes(groups * moved), exchanges)


@final
class TensorStep(NamedTuple):
    """A step of boxing on a tensor of whole `shape`."""

    step: BoxingStep
    shape: tuple[int, ...]
    dtype: str


def tensor_steps(graph: LogicalGraph) -> tuple[TensorStep, ...]:
    """The steps of all boxings of a graph in their order, those of equal ones, as in repeated layers, once."""
    boxings = [(graph.values[node.input.name], node.output.layout) for node in graph.of_kind(Box)]
    return tuple(
        dict.fromkeys(
            TensorStep(step, shape, dtype)
            for before, after, shape, dtype in dict.fromkeys(
                (value.layout, after, value.shape, value.dtype) for value, after in boxings
            )
            for step in steps(before, after, shape, ITEM_SIZE[dtype])
        )
    )
