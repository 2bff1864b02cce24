"""Rows that stand several times in a row, and sums of such: how tokens become rows of experts and come back."""

from __future__ import annotations

from weft.ir.logical import Arg, Call, LogicalGraph, Ref

_VIEWS = ("aten.view.default", "aten._unsafe_view.default", "aten.reshape.default")
_KEEPS = ("aten.clone.default", "aten.contiguous.default")


def repeated(graph: LogicalGraph, name: str) -> tuple[str, int] | None:
    """`x` and k for a value [rows, …] that holds each row of x [rows / k, …] k times in a row, k > 1."""
    shape = graph.values[name].shape
    apart = _behind(graph, name, (*_VIEWS, *_KEEPS), len(shape) + 1)
    if apart is None or len(apart.args) < 2 or apart.op != "aten.expand.default":
        return None
    tokens, each, *rest = _made_shape(apart)
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


def _behind(graph: LogicalGraph, name: str, through: tuple[str, ...], rank: int) -> Call | None:
    """What made a value, behind one view to `rank` dimensions and copies."""
    maker = graph.producers[name]
    while isinstance(maker, Call) and maker.op in through:
        source = _ref(maker.args[0])
        if source is None or len(graph.values[source].shape) != rank:
            return None
        maker = graph.producers[source]
    return maker if isinstance(maker, Call) else None


def _made_shape(call: Call) -> tuple[int, ...]:
    (value,) = call.outputs
    return value.shape if value else ()


def _ref(arg: Arg) -> str | None:
    return arg.name if isinstance(arg, Ref) else None
