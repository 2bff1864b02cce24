"""Parameters with a row for each word or class, read off the captured step: tables, and the layer behind a loss.

Each may be split by rows over the ranks that split the batch: rows need no gradient added up then, and only rows that
are looked up, or sums over classes, travel (OneFlow, arXiv 2110.15032, section 6: Wide & Deep, InsightFace).
"""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.logical import Call, Input, LogicalGraph, Ref
from weft.search.steps.forward_calls import forward
from weft.search.steps.linears import PRODUCTS, TURNS

_LOOKED_UP = frozenset(("aten.embedding.default", "aten._embedding_bag.default"))
_LOSS = "aten._log_softmax.default"
# Calls between a layer and its loss that keep classes apart: another shape or dtype, and a bias that is added.
_BETWEEN = frozenset(
    f"aten.{name}"
    for name in (
        *("view.default", "_unsafe_view.default", "reshape.default", "_to_copy.default"),
        *("unsqueeze.default", "squeeze.dim", "add.Tensor", "slice.Tensor"),
    )
)


def vocabularies(graph: LogicalGraph) -> tuple[str, ...]:
    """The keys of parameters whose first dimension is of words or classes."""
    found: dict[str, None] = {}
    for call in forward(graph):
        if call.op in _LOOKED_UP:
            found |= dict.fromkeys(_parameters(graph, call.args[:1]))
        elif call.op == _LOSS:
            found |= dict.fromkeys(_behind(graph, call.args[0]))
    return tuple(found)


def _behind(graph: LogicalGraph, at: object) -> Iterator[str]:
    """The parameters of the layer that makes a value, through calls between."""
    while isinstance(at, Ref) and isinstance(maker := graph.producers[at.name], Call):
        if maker.op in PRODUCTS:
            yield from _parameters(graph, maker.args)
            return
        if maker.op not in _BETWEEN:
            return
        yield from _parameters(graph, maker.args[1:])
        at = maker.args[0]


def _parameters(graph: LogicalGraph, arguments: tuple[object, ...]) -> Iterator[str]:
    """The keys of those arguments that are parameters, turned or cast."""
    for at in arguments:
        node = parameter_of(graph, at)
        if node is not None:
            yield node.key


def parameter_of(graph: LogicalGraph, at: object) -> Input | None:
    """The parameter that an argument is, turned or cast; None where it is none."""
    while isinstance(at, Ref):
        maker = graph.producers[at.name]
        if isinstance(maker, Input):
            return maker if maker.role == "parameter" and maker.value.shape else None
        if not isinstance(maker, Call) or maker.op not in TURNS:
            return None
        at = maker.args[0]
    return None
