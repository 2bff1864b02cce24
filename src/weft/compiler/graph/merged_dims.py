"""Dimensions of tensors that merge others, as the view that made them says, and arguments of calls on them.

What stands at which place of the tensor's shape while that dimension is apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import final

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


@final
@dataclass(frozen=True)
class Merged:
    """The dimension of a tensor that merges others, with their sizes.

    Attributes:
        rank: of the tensor.
        dim: the dimension.
        sizes: what it merges.
    """

    rank: int
    dim: int
    sizes: tuple[int, ...]

    def apart(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """A shape with the sizes in place of the dimension."""
        return (*shape[: self.dim], *self.sizes, *shape[self.dim + 1 :])

    def moved(self, dim: int) -> int | None:
        """The number of another dimension when this one is apart; None for this one."""
        dim %= self.rank
        return None if dim == self.dim else dim + (len(self.sizes) - 1) * (dim > self.dim)

    def turned(self, order: Sequence[int]) -> tuple[Merged, tuple[int, ...]]:
        """The merged sizes after the dimensions are put in another order, and the order of those that are apart."""
        more = range(len(self.sizes))
        groups = [
            [dim + i for i in more] if dim == self.dim else [dim + more[-1] * (dim > self.dim)]
            for dim in range(self.rank)
        ]
        apart = tuple(each for dim in order for each in groups[dim])
        return Merged(self.rank, list(order).index(self.dim), self.sizes), apart

    def stretches(self, shape: tuple[int, ...]) -> bool:
        """True where a tensor broadcasts to the same elements, whether they are merged or apart."""
        behind = self.rank - 1 - self.dim
        return prod(shape[: max(0, len(shape) - behind)]) == 1

    def parted_by(self, apart: tuple[int, ...], after: tuple[int, ...]) -> bool:
        """True where a view of the tensor, whose shape is `apart` when it is, cuts wherever this merges."""
        ends = list(accumulate(apart, mul))
        return set(ends[self.dim : self.dim + len(self.sizes) - 1]) <= set(accumulate(after, mul))


def merged_by(before: Sequence[int], after: tuple[int, ...]) -> Merged | None:
    """The dimension and sizes that a view from `before` merges in one of `after`; None where it is not just one."""
    ends = (1, *accumulate(after, mul))
    cuts = sorted({1, *accumulate(before, mul), *ends})
    if 0 in cuts or any(high % low for low, high in pairwise(cuts)):
        return None
    inside = ([cut for cut in cuts if start <= cut <= end] for start, end in pairwise(ends))
    sizes = [tuple(high // low for low, high in pairwise(each)) for each in inside]
    dims = [dim for dim, each in enumerate(sizes) if len(each) > 1]
    return Merged(len(after), dims[0], sizes[dims[0]]) if len(dims) == 1 else None


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
