"""The arguments of a call on merged dimensions, as it takes them where those are apart."""

from __future__ import annotations

from weft.compiler.graph.merged_dims import Merged
from weft.compiler.hints import is_hint
from weft.ir.logical import Arg, Call, LogicalGraph, Ref
from weft.ops.rule import aten, factors_of
from weft.ops.rules.common import pointwise
from weft.ops.rules.tensors.factories import UNIFORM

EXPAND, TRANSPOSE = "aten.expand.default", "aten.transpose.int"
PERMUTE = "aten.permute.default"
RANK = 3  # of a batched product's operands; tokens that are flattened for a linear layer have 2
# The positions of arguments that number a dimension.
_DIMS = {
    "aten._softmax.default": (1,),
    "aten._softmax_backward_data.default": (2,),
    "aten.gather.default": (1,),
    "aten.scatter_add.default": (1,),
}
# Makes a tensor beside another one, of the size that its second argument says.
_BESIDE = frozenset(aten("new_zeros new_ones new_full"))


def order_of(node: Call) -> list[int]:
    """The dimensions of what a transposition reads, in the order of what it makes."""
    given = node.args[1] if node.op == PERMUTE else node.args[1:]
    assert isinstance(given, tuple)
    dims = [dim % RANK for dim in given if isinstance(dim, int)]
    if node.op == PERMUTE:
        return dims
    one, two = dims
    found = list(range(RANK))
    found[one], found[two] = two, one
    return found


def arguments_apart(node: Call, merged: Merged) -> tuple[Arg, ...] | None:
    """The arguments of a call apart; None where it does not allow that."""
    if node.op in _BESIDE:
        (made,) = node.makes
        return (node.args[0], merged.apart(made.shape), *node.args[2:])
    if node.op not in _DIMS:
        return node.args if factors_of(node.op) is pointwise and not is_hint(node) else None
    found = list(node.args)
    for position in _DIMS[node.op]:
        dim = found[position]
        assert isinstance(dim, int)
        if (moved := merged.moved(dim)) is None:
            return None
        found[position] = moved
    return tuple(found)


def filled_apart(
    graph: LogicalGraph, node: Call, shape: tuple[int, ...], merged: Merged
) -> tuple[Arg, ...] | None:
    """The arguments of a call that fills a tensor of `shape`, apart, with equal elements; None for another call."""
    if node.op == UNIFORM:
        return (shape, (0,) * len(shape), shape, *node.args[3:])
    source = node.args[0] if node.op == EXPAND else None
    if isinstance(source, Ref) and merged.stretches(graph.values[source.name].shape):
        return (source, shape)
    return None
