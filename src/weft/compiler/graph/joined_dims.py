"""Dimensions that concatenate several parts: where they are joined, where cut, and the ops in between.

The outputs of one matrix are cut into queries, keys and values; their gradients are joined again. In
between, the products, biases, casts, sums and updates do not care in which order the dimension
stands, as their rules tell.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from math import prod
from typing import final

from weft.compiler.hints import is_hint
from weft.ir.logical import VARIABLE_ROLES, Call, Input, LogicalGraph, Node, Update
from weft.layout import Shares
from weft.ops.any_order import rows_of
from weft.ops.call import Argument, OpCall, argument, normal_dim, operand, slot_specs
from weft.ops.rule import aten


@final
@dataclass(frozen=True)
class JoinedDim:
    """A dimension, wherever ops pass it on in any order.

    Attributes:
        dims: its number in each value that has it.
        ends: the calls that cut it or join it, by the first value that they make.
        pieces: beginnings and ends of what they cut out, or put in.
    """

    size: int
    dims: Mapping[str, int]
    ends: frozenset[str]
    pieces: frozenset[Piece]

    @property
    def parts(self) -> tuple[int, ...]:
        """Lengths of the parts; none where pieces overlap, so that some hold several parts."""
        between = tuple(pairwise(sorted({0, self.size, *chain.from_iterable(self.pieces)})))
        if not self.pieces <= set(between):
            return ()
        return tuple(end - start for start, end in between)


def joined_dim(graph: LogicalGraph, name: str, dim: int) -> JoinedDim | None:
    """The dimension `dim` of a value, as far as it goes; None if something needs its order."""
    size = graph.values[name].shape[dim]
    walk = _DimWalk(graph, size)
    walk.add((name, dim))
    while walk.todo:
        if not walk.step(walk.todo.pop()):
            return None
    return JoinedDim(size, walk.dims, frozenset(walk.ends), frozenset(walk.pieces))


@dataclass
class _DimWalk:
    """Follows a dimension through the graph in both directions.

    Attributes:
        dims: what was reached, with the number of the dimension there.
        todo: values still to visit.
        ends, pieces: as of `JoinedDim`.
    """

    graph: LogicalGraph
    size: int
    dims: dict[str, int] = field(default_factory=dict)
    todo: list[str] = field(default_factory=list)
    ends: set[str] = field(default_factory=set)
    pieces: set[Piece] = field(default_factory=set)

    def add(self, *reached: tuple[str, int]) -> bool:
        """Note values; False if one has the dimension in two places."""
        for name, dim in reached:
            if name not in self.dims:
                self.dims[name] = dim
                self.todo.append(name)
            if self.dims[name] != dim:
                return False
        return True

    def step(self, name: str) -> bool:
        """Go on from a value; False if something needs the order."""
        if not self._made(self.graph.producers[name], name):
            return False
        return all(self._read(node, name) for node in self.graph.users[name])

    def _made(self, node: Node, name: str) -> bool:
        if isinstance(node, Input):
            return node.role in VARIABLE_ROLES
        if not isinstance(node, Call):
            return False
        return self._call(node, {}, {node.output_names.index(name): self.dims[name]})

    def _read(self, node: Node, name: str) -> bool:
        if isinstance(node, Update):
            shape = self.graph.values[name].shape
            refs = (node.target, node.source, *node.states)
            same = [ref.name for ref in refs if self.graph.values[ref.name].shape == shape]
            return (
                node.elementwise
                and name in same
                and self.add(*((each, self.dims[name]) for each in same))
            )
        if not isinstance(node, Call):
            return False
        return self._call(node, {node.operands.index(name): self.dims[name]}, {})

    def _call(self, node: Call, here: Mapping[int, int], made: Mapping[int, int]) -> bool:
        if is_hint(node) or node.varyings:
            return False
        call = node.first
        found = rows_of(call, here, self.size, made)
        if found is None:
            return self._end(node, here, made)
        results = node.output_names
        return self._add_all(node.operands, found[0]) and self._add_all(results, found[1])

    def _add_all(self, names: Iterable[str], dims: Iterable[int | None]) -> bool:
        pairs = zip(names, dims, strict=True)
        return self.add(*((name, dim) for name, dim in pairs if dim is not None))

    def _end(self, node: Call, here: Mapping[int, int], made: Mapping[int, int]) -> bool:
        """Note a call that cuts the dimension into parts, or joins it from parts."""
        call, joins = node.first, bool(made)
        (dim,) = (*here.values(), *made.values())
        pieces = pieces_of(call, dim, joins) or self._parted(node, call, dim, joins)
        self.pieces.update(pieces)
        self.ends.add(node.makes[0].name)
        # A call may cut another operand.
        return bool(pieces) and max(end for _, end in pieces) <= self.size

    def _parted(self, node: Call, call: OpCall, dim: int, joins: bool) -> tuple[Piece, ...]:
        """The pieces where a view has the parts one after the other, and they are taken one by one."""
        parts = parts_dim(call, dim, joins)
        if parts is None:
            return ()
        name = node.operands[0] if joins else node.makes[0].name
        count = self.graph.values[name].shape[parts]
        walk = _PartsWalk(self.graph, count, view=node)
        walk.add((name, parts))
        while walk.todo:
            if not walk.step(walk.todo.pop()):
                return ()
        return tuple(pairwise(range(0, self.size + 1, self.size // count))) if walk.taken else ()


@final
@dataclass
class _PartsWalk(_DimWalk):
    """Follows a dimension of parts to where the parts are used, or made, one by one.

    Attributes:
        view: which makes the dimension, or merges it.
        taken: true if parts are taken anywhere.
    """

    view: Call | None = None
    taken: bool = False

    def _end(self, node: Call, here: Mapping[int, int], made: Mapping[int, int]) -> bool:
        if node is self.view:
            return True
        (dim,) = (*here.values(), *made.values())
        self.taken = takes_one(node.first, dim, bool(made))
        return self.taken


# Calls that cut a dimension into parts, or join it from parts: where, and the same within blocks of it.
#
# Each does in blocks what it does to the whole: its operands are viewed with the blocks apart, an op runs
# on these, and what it makes is viewed as it was.


SLICE, SPLIT = "aten.slice.Tensor", "aten.split_with_sizes.default"
CAT, PAD = "aten.cat.default", "aten.constant_pad_nd.default"
SLICE_BACKWARD, TRANSPOSE = "aten.slice_backward.default", "aten.transpose.int"
GLU, GLU_BACKWARD = "aten.glu.default", "aten.glu_backward.default"
VIEWS = frozenset(aten("view _unsafe_view reshape"))
_SPLITS = frozenset(aten("split.Tensor split_with_sizes chunk"))
# The position of the dimension among the arguments of ops that select along it, or stack along it.
_TAKES = {"aten.unbind.int": 1, "aten.select.int": 1}
_MAKES = {"aten.stack.default": 1, "aten.select_backward.default": 2}

_Shape = tuple[int, ...]
# Where a part of a dimension begins and ends.
Piece = tuple[int, int]


@final
@dataclass(frozen=True)
class InBlocks:
    """The calls that run in place of one."""

    op: str
    args: tuple[Argument, ...]
    operands: tuple[_Shape, ...]
    results: tuple[_Shape, ...]


def pieces_of(call: OpCall, dim: int, joins: bool) -> tuple[Piece, ...]:
    """The pieces that a call cuts out of dimension `dim` of its operand, or puts into that of its result.

    Nothing where it does neither.
    """
    if call.op in (GLU, GLU_BACKWARD):
        backward, spec = call.op == GLU_BACKWARD, call.operands[-1]
        same = normal_dim(argument(call, 1 + backward, "dim", -1), len(spec.shape)) == dim
        half = spec.shape[dim] // 2
        return ((0, half), (half, 2 * half)) if same and (backward or not joins) else ()
    if joins:
        return _joined(call, dim)
    spec = call.operands[0]
    if call.op in _SPLITS and normal_dim(argument(call, 2, "dim", 0), len(spec.shape)) == dim:
        return _in_a_row(result.shape[dim] for result in call.results if result)
    if call.op == SLICE and argument(call, 4, "step", 1) == 1:
        same = normal_dim(argument(call, 1, "dim", 0), len(spec.shape)) == dim
        return (_range(call, spec.shape[dim], 2),) if same else ()
    return ()


def parts_dim(call: OpCall, dim: int, joins: bool) -> int | None:
    """The dimension of the parts where a view cuts `dim` of its operand, or joins that of its result.

    A view of [..., 3·n, ...] as [..., 3, n, ...], in which sizes may be merged or cut further, has the
    parts one after the other in the dimension of size 3.
    """
    result = call.results[0]
    if call.op not in VIEWS or result is None:
        return None
    one, other = call.operands[0].shape, result.shape
    whole, pieces = (other, one) if joins else (one, other)
    before = prod(whole[:dim])
    for number, size in enumerate(pieces):
        if prod(pieces[:number]) == before and size > 1:
            return number if size < whole[dim] and whole[dim] % size == 0 else None
    return None


def takes_one(call: OpCall, dim: int, joins: bool) -> bool:
    """True if a call takes indices of dimension `dim` of its operand, or makes that of its result, one by one."""
    known = _MAKES if joins else _TAKES
    if call.op not in known:
        return bool(pieces_of(call, dim, joins))
    result = call.results[0]
    rank = len(result.shape) if joins and result else len(call.operands[0].shape)
    return normal_dim(argument(call, known[call.op], "dim", 0), rank) == dim


def in_blocks(call: OpCall, shares: Shares) -> InBlocks:
    """The calls that do within each block the work of a call on the whole dimension.

    Args:
        call: one of those for which there are pieces, or `parts_dim` says where the parts are.
        shares: with the dimension's number in what is cut, or in what is made.
    """
    if call.op in VIEWS:
        return _turned(call, shares)
    op, args = _op(call, shares)
    operands = tuple(_blocks(spec.shape, shares) for spec in call.operands)
    results = tuple(_blocks(spec.shape, shares) for spec in call.results if spec)
    return InBlocks(op, args, operands, results)


def _op(call: OpCall, shares: Shares) -> tuple[str, tuple[Argument, ...]]:
    dim, blocks = shares.dim + 1, shares.blocks
    x, result = operand(0), call.results[0]
    assert result is not None  # they make tensors
    if call.op == SLICE:
        begin, end = _range(call, shares.size, 2)
        return SLICE, (x, dim, begin // blocks, end // blocks, 1)
    if call.op in _SPLITS:
        sizes = tuple(result.shape[shares.dim] // blocks for result in call.results if result)
        return SPLIT, (x, sizes, dim)
    if call.op == CAT:
        return CAT, (call.args[0], dim)
    if call.op in (GLU, GLU_BACKWARD):
        return call.op, (*call.args[: len(call.operands)], dim)
    if call.op == SLICE_BACKWARD:
        begin, end = _range(call, shares.size, 3)
        shape = _blocks(result.shape, shares)
        return SLICE_BACKWARD, (x, shape, dim, begin // blocks, end // blocks, 1)
    before, after = _pads(call, len(result.shape))[shares.dim]
    behind = (0, 0) * (len(result.shape) - dim)
    return PAD, (x, (*behind, before // blocks, after // blocks), *call.args[2:])


def _turned(call: OpCall, shares: Shares) -> InBlocks:
    result = call.results[0]
    assert result is not None  # a view
    joins = result.shape[shares.dim : shares.dim + 1] == (shares.size,)
    whole = result.shape if joins else call.operands[0].shape
    parts, blocks, dim = len(shares.parts), shares.blocks, shares.dim
    each = shares.parts[0] // blocks

    def shape(*sizes: int) -> _Shape:
        return (*whole[:dim], *sizes, each, *whole[dim + 1 :])

    there, back = shape(blocks, parts), shape(parts, blocks)
    before, after = (back, there) if joins else (there, back)
    return InBlocks(TRANSPOSE, (operand(0), dim, dim + 1), (before,), (after,))


def _joined(call: OpCall, dim: int) -> tuple[Piece, ...]:
    result = call.results[0]
    if result is None:
        return ()
    rank = len(result.shape)
    if call.op == CAT and normal_dim(argument(call, 1, "dim", 0), rank) == dim:
        specs = slot_specs(call)
        same = all(len(spec.shape) == rank for spec in specs)  # empty tensors of one dimension
        return _in_a_row(spec.shape[dim] for spec in specs) if same else ()
    if call.op == SLICE_BACKWARD and argument(call, 5, "step", 1) == 1:
        same = normal_dim(argument(call, 2, "dim"), rank) == dim
        return (_range(call, result.shape[dim], 3),) if same else ()
    if call.op == PAD:
        pads = _pads(call, rank)
        before, after = pads.pop(dim)
        alone = not any(any(pair) for pair in pads.values())
        if alone and before >= 0 and after >= 0:
            return ((before, result.shape[dim] - after),)
    return ()


def _in_a_row(sizes: Iterable[int]) -> tuple[Piece, ...]:
    return tuple(pairwise((0, *accumulate(sizes))))


def _range(call: OpCall, size: int, first: int) -> tuple[int, int]:
    start = argument(call, first, "start", None)
    end = argument(call, first + 1, "end", None)
    begin, stop, _ = slice(start, end).indices(size)
    return begin, max(begin, stop)


def _pads(call: OpCall, rank: int) -> dict[int, tuple[int, int]]:
    given = argument(call, 1, "pad")
    pairs: Iterator[tuple[int, int]] = zip(given[::2], given[1::2], strict=True)
    found = dict.fromkeys(range(rank), (0, 0))
    return found | {rank - 1 - number: pair for number, pair in enumerate(pairs)}


def _blocks(shape: _Shape, shares: Shares) -> _Shape:
    dim, blocks = shares.dim, shares.blocks
    return (*shape[:dim], blocks, shape[dim] // blocks, *shape[dim + 1 :])
