"""Calls that work on each row alone, and the same on rows in blocks: [s, …] becomes [b, r, …]."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from weft.ir.logical import Arg, Call, LogicalGraph, Ref, node_uses
from weft.ops.rule import factors_of
from weft.ops.rules.common import pointwise

# Ops along other dimensions than the rows, with the places of the arguments that name dimensions
# and shapes.
_DIMS: dict[str, int] = {
    "aten.slice.Tensor": 1,
    "aten.split.Tensor": 2,
    "aten.split_with_sizes.default": 2,
    "aten.cat.default": 1,
    "aten.sum.dim_IntList": 1,
    "aten.slice_backward.default": 2,
}
_SHAPES = {"aten.slice_backward.default": 1, "aten.expand.default": 1}
# Where no dimension is named.
_DEFAULTS = {"aten.slice.Tensor": 0, "aten.split.Tensor": 0, "aten.cat.default": 0}
_ALIKE = ("zeros_like", "ones_like", "full_like", "empty_like", "uniform")


def works_on_rows(graph: LogicalGraph, node: Call, rows: int) -> bool:
    """Whether a call makes each of `rows` rows of its results from the same rows of operands."""
    made = [value for value in node.outputs if value]
    if not made or any(value.shape[:1] != (rows,) for value in made):
        return False
    if node.op in _DIMS:
        rank = len(graph.values[node_uses(node)[0]].shape)
        whole = all(graph.values[name].shape[:1] == (rows,) for name in node_uses(node))
        return whole and rank > 1 and all(dim % rank for dim in _dims(node))
    if factors_of(node.op) is not pointwise or any(word in node.op for word in _ALIKE):
        return False
    # Rows are the first dimension of all that have as many dimensions as the result.
    return node.op not in _SHAPES or _shape(node)[:1] == (rows,)


def has_rows(graph: LogicalGraph, node: Call, name: str, rows: int) -> bool:
    """Whether an operand of such a call has the rows in its first dimension."""
    shape = graph.values[name].shape
    rank = max(len(value.shape) for value in node.outputs if value)
    return shape[:1] == (rows,) and (node.op in _DIMS or len(shape) == rank)


def in_blocks(
    graph: LogicalGraph, node: Call, shape: tuple[int, int], moved: Callable[[str], Ref]
) -> Call:
    """The call on rows in blocks of `shape`; `moved` gives what stands for an operand there.

    Dimensions that count from the back stay, as those behind the rows do.
    """

    def arg(value: Arg) -> Arg:
        if isinstance(value, tuple):
            return tuple(arg(part) for part in value)
        return moved(value.name) if isinstance(value, Ref) else value

    args: list[Any] = [arg(value) for value in node.args]
    if node.op in _DIMS and _DIMS[node.op] < len(args):
        args[_DIMS[node.op]] = _behind(args[_DIMS[node.op]])
    if node.op in _SHAPES:
        args[_SHAPES[node.op]] = (*shape, *args[_SHAPES[node.op]][1:])
    return replace(node, args=tuple(args))


def _behind(dims: Any) -> Any:
    if isinstance(dims, tuple):
        return tuple(map(_behind, dims))
    return dims + 1 if dims >= 0 else dims


def _dims(node: Call) -> tuple[int, ...]:
    place = _DIMS[node.op]
    if place >= len(node.args):
        return (_DEFAULTS.get(node.op, 0),)
    dims: Any = node.args[place]
    return dims if isinstance(dims, tuple) else (dims,)


def _shape(node: Call) -> tuple[Any, ...]:
    shape: Any = node.args[_SHAPES[node.op]]
    return tuple(shape)
