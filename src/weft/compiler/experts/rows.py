"""Calls that work on each row alone, and the same on rows in blocks: [s, …] becomes [b, r, …].

Rows that stand several times in a row, and sums of such: how tokens become rows of experts and come back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from weft.ir.logical import Arg, Call, LogicalGraph, Ref
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
    """True where a call makes each of `rows` rows of its results from the same rows of operands."""
    made = [value for value in node.outputs if value]
    if not made or any(value.shape[:1] != (rows,) for value in made):
        return False
    if node.op in _DIMS:
        rank = len(graph.values[node.uses[0]].shape)
        whole = all(graph.values[name].shape[:1] == (rows,) for name in node.uses)
        return whole and rank > 1 and all(dim % rank for dim in _dims(node))
    if factors_of(node.op) is not pointwise or any(word in node.op for word in _ALIKE):
        return False
    # Rows are the first dimension of all that have as many dimensions as the result.
    return node.op not in _SHAPES or _shape(node)[:1] == (rows,)


def has_rows(graph: LogicalGraph, node: Call, name: str, rows: int) -> bool:
    """True where an operand of such a call has the rows in its first dimension."""
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
    return node.changed(args=tuple(args))


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


_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_KEEPS = ("aten.clone.default", "aten.contiguous.default")


def repeated(graph: LogicalGraph, name: str) -> tuple[str, int] | None:
    """`x` and k for a value [rows, …] that holds each row of x [rows / k, …] k times in a row, k > 1."""
    shape = graph.values[name].shape
    apart = _maker_behind(graph, name, (*_VIEWS, *_KEEPS), len(shape) + 1)
    if apart is None or len(apart.args) < 2 or apart.op != "aten.expand.default":
        return None
    (value,) = apart.outputs
    tokens, each, *rest = value.shape if value else ()
    one = _ref(apart.args[0])
    if tokens * each != shape[0] or tuple(rest) != shape[1:] or each < 2 or one is None:
        return None
    maker = graph.producers[one]
    if graph.values[one].shape != (tokens, 1, *rest) or not isinstance(maker, Call):
        return None
    x = _ref(maker.args[0]) if maker.op in (*_VIEWS, "aten.unsqueeze.default") else None
    return (x, each) if x is not None and graph.values[x].shape == (tokens, *rest) else None


def summed(graph: LogicalGraph, call: Call) -> tuple[str, int] | None:
    """The value [rows, …] of which a call makes [rows / k, …], the sums of each k rows, and k > 1."""
    match call:
        case Call(op="aten.sum.dim_IntList", args=(Ref(name=apart), (1,), *keeps), kwargs=()):
            if any(keeps):
                return None
        case _:
            return None
    view, (tokens, each, *rest) = graph.producers[apart], graph.values[apart].shape
    if not isinstance(view, Call) or view.op not in _VIEWS or each < 2:
        return None
    x = _ref(view.args[0])
    same = x is not None and graph.values[x].shape == (tokens * each, *rest)
    return (x, each) if x is not None and same else None


def _maker_behind(
    graph: LogicalGraph, name: str, through: tuple[str, ...], rank: int
) -> Call | None:
    """The call that made a value, behind one view to `rank` dimensions and copies."""
    maker = graph.producers[name]
    while isinstance(maker, Call) and maker.op in through:
        source = _ref(maker.args[0])
        if source is None or len(graph.values[source].shape) != rank:
            return None
        maker = graph.producers[source]
    return maker if isinstance(maker, Call) else None


def _ref(arg: Arg) -> str | None:
    return arg.name if isinstance(arg, Ref) else None
