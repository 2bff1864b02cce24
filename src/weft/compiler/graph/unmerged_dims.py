"""Dimensions that one view merges and a later view splits again stay separate in between.

Batched products take one batch dimension, so attention that is written with them runs on [batch·heads, time, width].
A split by heads is not a split of that dimension: tensor parallelism would move the heads to the batch and back. So
the merged dimensions stay separate through transpositions, element-wise ops, softmax, look-ups along other dimensions
and batched products, which become `aten.matmul`, up to the view that splits them again.

Before: a graph as captured. After: an equal one, in which other calls are between such views.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import final

from weft.compiler.context import Context
from weft.compiler.graph.rewriting import needed, ref_name, renamed
from weft.compiler.hints import is_hint
from weft.ir.logical import Arg, Call, LogicalGraph, Node, Ref, Value, refs
from weft.ops.rule import aten, factors_of
from weft.ops.rules.common import pointwise
from weft.ops.rules.pointwise import UNIFORM

VIEWS = frozenset(aten("view _unsafe_view reshape"))
VIEW, MATMUL = "aten.view.default", "aten.matmul.default"
MUL, ADD = "aten.mul.Tensor", "aten.add.Tensor"
REPEAT = "aten.repeat.default"
BMM, BADDBMM = "aten.bmm.default", "aten.baddbmm.default"


def keep_unmerged(graph: LogicalGraph, _: Context) -> LogicalGraph:
    """The graph with dimensions apart between the views that merge them and those that part them."""
    writer = _UnmergedWriter(graph, UnmergedValues(graph))
    for node in graph.nodes:
        writer.write(node)
    if not writer.changed:
        return graph
    found = needed(replace(graph, nodes=tuple(writer.values.nodes)))
    twice = {name for name in writer.lifted if writer.values.known[name][0].name in found.producers}
    nodes = (
        writer.merged(node) if any(value.name in twice for value in node.makes) else node
        for node in found.nodes
    )
    return needed(renamed(replace(found, nodes=tuple(nodes)), writer.equal))


@final
@dataclass
class _UnmergedWriter:
    """Writes each call unchanged, and before it the same with unmerged dimensions; unused calls are removed later.

    Attributes:
        values: of the new graph, merged and unmerged.
        lifted: values that calls make both merged and unmerged.
        equal: what parts something merged, and is just what is there apart.
        changed: true if a reader now uses unmerged dimensions.
    """

    graph: LogicalGraph
    values: UnmergedValues
    lifted: set[str] = field(default_factory=set)
    equal: dict[str, str] = field(default_factory=dict)
    changed: bool = False

    def write(self, node: Node) -> None:
        """Write a node."""
        made = _made(node)
        if isinstance(node, Call) and made and node.op in VIEWS:
            self._view(node, made)
            return
        if isinstance(node, Call) and made and node.op == REPEAT:
            # Biases of heads, repeated for each sequence: sequences and heads, apart by an expansion.
            source, repeats = self.graph.values[ref_name(node.args[0])], node.args[1]
            assert isinstance(repeats, tuple)
            if len(source.shape) == len(repeats) == RANK and repeats[1:] == (1, 1):
                merged = Merged(RANK, 0, (made.shape[0] // source.shape[0], source.shape[0]))
                shape = merged.apart(made.shape)
                there = self.values.write(node, EXPAND, (source.ref, shape), made, shape)
                self.values.known[made.name] = there, merged
        if isinstance(node, Call) and made and len(made.shape) == RANK:
            self._lift(node, made)
        self.values.nodes.append(node)

    def merged(self, node: Node) -> Call:
        """Replace a call whose result also exists unmerged by a view of that value."""
        assert isinstance(node, Call)
        made = _made(node)
        assert made is not None
        args = (self.values.known[made.name][0].ref, made.shape)
        return node.changed(op=VIEW, args=args, kwargs=())

    def _view(self, node: Call, made: Value) -> None:
        """A view, of what is apart where it parts that; what it merges is there apart."""
        source = self.graph.values[ref_name(node.args[0])]
        if source.name in self.values.known:
            there, merged = self.values.known[source.name]
            if merged.parted_by(there.shape, made.shape):
                source, self.changed = there, True
                node = node.changed(op=VIEW, args=(source.ref, made.shape), kwargs=())
                if source.shape == made.shape:
                    self.equal[made.name] = source.name
        self.values.nodes.append(node)
        found = merged_by(source.shape, made.shape) if len(made.shape) == RANK else None
        if found is not None:
            shape = found.apart(made.shape)
            if shape != source.shape:
                source = self.values.write(node, VIEW, (source.ref, shape), made, shape)
            self.values.known[made.name] = source, found

    def _lift(self, node: Call, made: Value) -> None:
        known = {self.values.known[name][1] for name in node.uses if name in self.values.known}
        if len(known) != 1 or any(list(refs(arg)) for _, arg in node.kwargs):
            return
        (merged,) = known
        if node.op in (TRANSPOSE, PERMUTE):
            turned, order = merged.turned(order_of(node))
            moved = (*self.values.args_apart(node.args[:1]), order)
            found = self.values.write(node, PERMUTE, moved, made, turned.apart(made.shape))
            self.values.known[made.name] = found, turned
            self.lifted.add(made.name)
            return
        product = node.op in (BMM, BADDBMM)
        args = node.args if product else arguments_apart(node, merged)
        if args is None or (product and merged.dim):
            return
        names = [ref_name(arg) for arg in args[-2:]] if product else []
        if not all(name in self.values.known for name in names):
            return
        if not all(self.values.is_apart(name, merged) for name in node.uses):
            return
        args, shape = self.values.args_apart(args), merged.apart(made.shape)
        if product:
            there = self._product(node, args, made, merged)
        else:
            there = self.values.write(node, node.op, args, made, shape, node.kwargs)
        self.values.known[made.name] = there, merged
        self.lifted.add(made.name)

    def _product(self, node: Call, args: tuple[Arg, ...], made: Value, merged: Merged) -> Value:
        shape, scales = merged.apart(made.shape), dict(node.kwargs)
        found = self.values.write(node, MATMUL, args[-2:], made, shape)
        if scales.get("alpha", 1) != 1:
            found = self.values.write(node, MUL, (found.ref, scales["alpha"]), made, shape)
        if len(args) > 2 and scales.get("beta", 1) != 0:
            given = (("alpha", scales["beta"]),) if scales.get("beta", 1) != 1 else ()
            found = self.values.write(node, ADD, (found.ref, args[0]), made, shape, given)
        return found


def _made(node: Node) -> Value | None:
    return node.outputs[0] if isinstance(node, Call) and len(node.outputs) == 1 else None


@final
@dataclass
class UnmergedValues:
    """Finds unmerged values, and writes calls that make them.

    Attributes:
        nodes: what is written so far.
        known: for each unmerged value, the merged dimensions.
    """

    graph: LogicalGraph
    nodes: list[Node] = field(default_factory=list)
    known: dict[str, tuple[Value, Merged]] = field(default_factory=dict)

    def is_apart(self, name: str, merged: Merged) -> bool:
        """True if a value may be read apart; values made of nothing are made apart."""
        if name in self.known:
            return self.known[name][1] == merged
        value, maker = self.graph.values[name], self.graph.producers[name]
        if merged.stretches(value.shape):
            return True
        if not isinstance(maker, Call) or any(list(refs(arg)) for _, arg in maker.kwargs):
            return False
        args = filled_apart(self.graph, maker, merged.apart(value.shape), merged)
        cares = factors_of(maker.op) is not pointwise
        if args is None and not cares and all(self.is_apart(x, merged) for x in maker.uses):
            args = self.args_apart(maker.args)
        if args is None:
            return False
        there = self.write(maker, maker.op, args, value, merged.apart(value.shape), maker.kwargs)
        self.known[name] = there, merged
        return True

    def args_apart(self, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
        """Arguments with values that are apart in place of merged ones."""

        def there(arg: Arg) -> Arg:
            known = self.known.get(arg.name) if isinstance(arg, Ref) else None
            return known[0].ref if known else arg

        return tuple(map(there, args))

    def write(
        self,
        node: Call,
        op: str,
        args: tuple[Arg, ...],
        of: Value,
        shape: tuple[int, ...],
        kwargs: tuple[tuple[str, Arg], ...] = (),
    ) -> Value:
        """Write a call where `node` stands, that makes `of` in another shape."""
        made = Value(f"{of.name}.apart{len(self.nodes)}", shape, of.dtype)
        self.nodes.append(node.changed(op=op, args=args, kwargs=kwargs, outputs=(made,)))
        return made


# Dimensions of tensors that merge others, as the view that made them says, and arguments of calls on them.
#
# What is at which place of the tensor's shape while that dimension is apart.


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
    """The dimension of a tensor that merges others, with their sizes."""

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
        """True if a tensor broadcasts to the same elements, whether they are merged or apart."""
        behind = self.rank - 1 - self.dim
        return prod(shape[: max(0, len(shape) - behind)]) == 1

    def parted_by(self, apart: tuple[int, ...], after: tuple[int, ...]) -> bool:
        """True if a view of the tensor, whose shape is `apart` when it is, cuts wherever this merges."""
        ends = list(accumulate(apart, mul))
        return set(ends[self.dim : self.dim + len(self.sizes) - 1]) <= set(accumulate(after, mul))


def merged_by(before: Sequence[int], after: tuple[int, ...]) -> Merged | None:
    """The dimension and sizes that a view from `before` merges in one of `after`; None if it is not just one."""
    ends = (1, *accumulate(after, mul))
    cuts = sorted({1, *accumulate(before, mul), *ends})
    if 0 in cuts or any(high % low for low, high in pairwise(cuts)):
        return None
    inside = ([cut for cut in cuts if start <= cut <= end] for start, end in pairwise(ends))
    sizes = [tuple(high // low for low, high in pairwise(each)) for each in inside]
    dims = [dim for dim, each in enumerate(sizes) if len(each) > 1]
    return Merged(len(after), dims[0], sizes[dims[0]]) if len(dims) == 1 else None


def order_of(node: Call) -> list[int]:
    """The operand's dimensions in the order of a transposition's result."""
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
    """The arguments of a call apart; None if it does not allow that."""
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
