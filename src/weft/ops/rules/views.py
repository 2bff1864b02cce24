"""Ops that move or rename elements: linear, and Partial(max) and Partial(min) pass as well."""

from __future__ import annotations

from functools import partial
from math import prod

from weft.ops.call import OpCall, argument, normal_dim, normal_dims, slot_specs, with_arguments
from weft.ops.factors import WHOLE, Dims, Factors
from weft.ops.rule import Cut, aten, renamed, resized, rule, sharing
from weft.ops.rules.common import (
    FIRST,
    TOGETHER,
    except_dims,
    numbered,
    pointwise,
    shape_of,
    without_dims,
)

# Declares the rule of ops that move elements.
_moves = partial(rule, linear=FIRST, monotone=FIRST)


def _groups(source: tuple[int, ...], target: tuple[int, ...]) -> list[tuple[list[int], list[int]]]:
    """The smallest runs of dimensions of both shapes with equal products; dimensions of size 1 left out."""
    left = [i for i, size in enumerate(source) if size != 1]
    right = [i for i, size in enumerate(target) if size != 1]
    groups = []
    while left:
        a, b = [left.pop(0)], [right.pop(0)]
        while (size := prod(source[i] for i in a)) != (other := prod(target[i] for i in b)):
            (a if size < other else b).append((left if size < other else right).pop(0))
        groups.append((a, b))
    return groups


def reshape_factors(call: OpCall) -> Factors:
    """Runs of dimensions that a reshape merges or splits share the factor of their leading dimensions."""
    source, target = slot_specs(call)[0].shape, shape_of(call.results[0])
    before, after = [WHOLE] * len(source), [WHOLE] * len(target)
    if 0 not in source:
        for number, (a, b) in enumerate(_groups(source, target)):
            before[a[0]] = after[b[0]] = f"g{number}"
    return Factors((tuple(before),), (tuple(after),))


def _adapt_repeat(local: OpCall, cut: Cut) -> OpCall:
    after = shape_of(local.results[0])
    before = (1,) * (len(after) - len(local.operands[0].shape)) + local.operands[0].shape
    repeats = argument(local, 1, "repeats")
    changed = tuple(
        repeat if b == 0 else a // b for repeat, a, b in zip(repeats, after, before, strict=True)
    )
    return with_arguments(local, {1: changed})


def _adapt_triangle(local: OpCall, cut: Cut) -> OpCall:
    """A block that starts at row r and column c sees the diagonal moved by r - c."""
    row, _ = cut.operand_range(0, len(local.operands[0].shape) - 2)
    column, _ = cut.operand_range(0, len(local.operands[0].shape) - 1)
    diagonal = argument(cut.whole, 1, "diagonal", 0) + row - column
    return OpCall(local.op, (local.args[0], diagonal), (), local.operands, local.results)


def _plane(call: OpCall, shape: tuple[int, ...], first: int) -> tuple[Dims, Dims]:
    """Factors of a tensor whose two dimensions at `first` and `first + 1` make a plane, and of its diagonals."""
    rank = len(shape)
    default = (-2, -1) if call.op == "aten.diag_embed.default" else (0, 1)
    pairs = ((first, "dim1", default[0]), (first + 1, "dim2", default[1]))
    dims = {normal_dim(argument(call, *pair), rank) for pair in pairs}
    return except_dims(rank, dims), (*without_dims(rank, dims), WHOLE)


# A shard may be laid out differently from the whole (a slice of it, say), so that its view may need a
# copy.
_moves(
    aten("view _unsafe_view reshape"),
    reshape_factors,
    adapt=renamed("aten.reshape.default", 1),
    view=True,
)
# A shard may have size 1 where the whole has not, and must not be squeezed there.
_moves(
    aten("squeeze squeeze.dim squeeze.dims flatten.using_ints unflatten.int"),
    reshape_factors,
    adapt=renamed("aten.reshape.default", 1),
    view=True,
)
_moves(aten("unsqueeze"), reshape_factors, view=True)
_moves(aten("expand broadcast_to"), pointwise, adapt=resized(1), view=True)


@_moves(aten("permute"), view=True)
def _permute(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    order = [normal_dim(dim, rank) for dim in argument(call, 1, "dims")]
    names = numbered(rank)
    return Factors((names,), (tuple(names[i] for i in order),))


@_moves(aten("transpose.int"), view=True)
def _transpose(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    a, b = (normal_dim(argument(call, i, f"dim{i - 1}"), rank) for i in (1, 2))
    names = list(numbered(rank))
    if names:
        names[a], names[b] = names[b], names[a]
    return Factors((numbered(rank),), (tuple(names),))


@_moves(aten("t"), view=True)
def _reverse(call: OpCall) -> Factors:
    names = numbered(len(call.operands[0].shape))
    return Factors((names,), (names[::-1],))


@_moves(aten("slice.Tensor"), view=True)
def _slice(call: OpCall) -> Factors:
    """A slice of everything, as indexing with `:` leaves it, may be split; any other is whole along its dimension."""
    before, after = call.operands[0].shape, shape_of(call.results[0])
    cut = {i for i, size in enumerate(before) if size != after[i]}
    if argument(call, 4, "step", 1) != 1:
        cut.add(normal_dim(argument(call, 1, "dim", 0), len(before)))
    names = except_dims(len(before), cut)
    return Factors((names,), (names,))


@_moves(aten("select.int unbind.int"), view=True)
def _select(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    dims = {normal_dim(argument(call, 1, "dim", 0), rank)}
    return Factors((except_dims(rank, dims),), (without_dims(rank, dims),) * len(call.results))


@_moves(aten("split.Tensor split_with_sizes chunk unsafe_chunk unsafe_split.Tensor"), view=True)
def _pieces(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    names = except_dims(rank, {normal_dim(argument(call, 2, "dim", 0), rank)})
    return Factors((names,), (names,) * len(call.results))


@_moves(aten("cat"))
def _cat(call: OpCall) -> Factors:
    rank = len(shape_of(call.results[0]))
    names = except_dims(rank, {normal_dim(argument(call, 1, "dim", 0), rank)})
    operands = (names if len(spec.shape) == rank else (WHOLE,) for spec in slot_specs(call))
    return Factors(tuple(operands), (names,))


@_moves(aten("stack"))
def _stack(call: OpCall) -> Factors:
    rank = len(shape_of(call.results[0]))
    dims = {normal_dim(argument(call, 1, "dim", 0), rank)}
    operands = (without_dims(rank, dims),) * len(slot_specs(call))
    return Factors(operands, (except_dims(rank, dims),))


@rule(aten("constant_pad_nd"), linear=((0, 2),))
def _pad(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    pad = argument(call, 1, "pad")
    padded = {rank - 1 - i // 2 for i, amount in enumerate(pad) if amount}
    names = except_dims(rank, padded)
    return Factors((names,), (names,))


@_moves(aten("repeat"), adapt=_adapt_repeat)
def _repeat(call: OpCall) -> Factors:
    """Dimensions that are not repeated may be split; so may those that only repeat a single element."""
    before, after = call.operands[0].shape, shape_of(call.results[0])
    shift = len(after) - len(before)
    stretched = {i for i, size in enumerate(before) if size not in (1, after[i + shift])}
    names = tuple(WHOLE if i in stretched else f"d{i + shift}" for i in range(len(before)))
    return Factors((names,), (except_dims(len(after), {i + shift for i in stretched}),))


@_moves(aten("roll"))
def _roll(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    names = except_dims(rank, normal_dims(argument(call, 2, "dims"), rank))
    return Factors((names,), (names,))


@_moves(aten("flip"))
def _flip(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    dims = argument(call, 1, "dims")
    names = except_dims(rank, normal_dims(dims, rank) if dims else set())
    return Factors((names,), (names,))


@rule(aten("slice_scatter select_scatter"), linear=TOGETHER, monotone=TOGETHER)
def _scatter_piece(call: OpCall) -> Factors:
    """`slice_scatter` and `select_scatter`: whole along their dimension."""
    rank = len(call.operands[0].shape)
    dims = {normal_dim(argument(call, 2, "dim", 0), rank)}
    names = except_dims(rank, dims)
    piece = names if len(slot_specs(call)[1].shape) == rank else without_dims(rank, dims)
    return Factors((names, piece), (names,))


@rule(aten("slice_backward"), linear=FIRST, adapt=resized(1))
def _slice_backward(call: OpCall) -> Factors:
    rank = len(shape_of(call.results[0]))
    names = except_dims(rank, {normal_dim(argument(call, 2, "dim", 0), rank)})
    return Factors((names,), (names,))


@rule(aten("select_backward"), linear=FIRST, adapt=resized(1))
def _select_backward(call: OpCall) -> Factors:
    rank = len(shape_of(call.results[0]))
    dims = {normal_dim(argument(call, 2, "dim", 0), rank)}
    return Factors((without_dims(rank, dims),), (except_dims(rank, dims),))


@rule(aten("tril triu"), linear=FIRST, adapt=_adapt_triangle, places=(1,))
def _triangle(call: OpCall) -> Factors:
    names = numbered(len(call.operands[0].shape))
    return Factors((names,), (names,))


rule(aten("view_as_complex"), "... 1 -> ...", linear=FIRST, view=True)
rule(aten("view_as_real"), "... -> ... 1", linear=FIRST, view=True)


@_moves(aten("diagonal"), view=True)
def _diagonal(call: OpCall) -> Factors:
    plane, diagonal = _plane(call, call.operands[0].shape, 2)
    return Factors((plane,), (diagonal,))


@rule(aten("diagonal_backward"), linear=FIRST, adapt=resized(1))
def _diagonal_backward(call: OpCall) -> Factors:
    plane, diagonal = _plane(call, shape_of(call.results[0]), 3)
    return Factors((diagonal,), (plane,))


@rule(aten("diag_embed"), linear=FIRST)
def _diag_embed(call: OpCall) -> Factors:
    plane, diagonal = _plane(call, shape_of(call.results[0]), 2)
    return Factors((diagonal,), (plane,))


@_moves(aten("unfold"), view=True)
def _unfold(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    names = except_dims(rank, {normal_dim(argument(call, 1, "dimension"), rank)})
    return Factors((names,), ((*names, WHOLE),))


@rule(aten("unfold_backward"), linear=FIRST, adapt=resized(1))
def _unfold_backward(call: OpCall) -> Factors:
    rank = len(shape_of(call.results[0]))
    names = except_dims(rank, {normal_dim(argument(call, 2, "dim"), rank)})
    return Factors(((*names, WHOLE),), (names,))


# Views that run whole, or that no graph holds but a test may.
sharing(
    aten("_neg_view _reshape_alias as_strided expand_as lift_fresh movedim.intlist narrow numpy_T")
)
sharing(aten("swapaxes unsafe_split_with_sizes view.dtype view_as"))
