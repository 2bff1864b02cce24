"""Ops that move or rename elements: linear, and Partial(max) and Partial(min) pass as well."""

from __future__ import annotations

from math import prod
from typing import Any

from weft.ops.arguments import argument, normal_dim, normal_dims, slot_specs, with_arguments
from weft.ops.call import OpCall
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

MOVES: dict[str, Any] = {"linear": FIRST, "monotone": FIRST}


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


def _permute(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    order = [normal_dim(dim, rank) for dim in argument(call, 1, "dims")]
    names = numbered(rank)
    return Factors((names,), (tuple(names[i] for i in order),))


def _transpose(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    a, b = (normal_dim(argument(call, i, f"dim{i - 1}"), rank) for i in (1, 2))
    names = list(numbered(rank))
    if names:
        names[a], names[b] = names[b], names[a]
    return Factors((numbered(rank),), (tuple(names),))


def _reverse(call: OpCall) -> Factors:
    names = numbered(len(call.operands[0].shape))
    return Factors((names,), (names[::-1],))


def _slice(call: OpCall) -> Factors:
    """A slice of everything, as indexing with `:` leaves it, may be split; any other is whole along its dimension."""
    before, after = call.operands[0].shape, shape_of(call.results[0])
    cut = {i for i, size in enumerate(before) if size != after[i]}
    if argument(call, 4, "step", 1) != 1:
        cut.add(normal_dim(argument(call, 1, "dim", 0), len(before)))
    names = except_dims(len(before), cut)
    return Factors((names,), (names,))


def _select(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    dims = {normal_dim(argument(call, 1, "dim", 0), rank)}
    return Factors((except_dims(rank, dims),), (without_dims(rank, dims),) * len(call.results))


def _pieces(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    names = except_dims(rank, {normal_dim(argument(call, 2, "dim", 0), rank)})
    return Factors((names,), (names,) * len(call.results))


def _cat(call: OpCall) -> Factors:
    rank = len(shape_of(call.results[0]))
    names = except_dims(rank, {normal_dim(argument(call, 1, "dim", 0), rank)})
    operands = (names if len(spec.shape) == rank else (WHOLE,) for spec in slot_specs(call))
    return Factors(tuple(operands), (names,))


def _stack(call: OpCall) -> Factors:
    rank = len(shape_of(call.results[0]))
    dims = {normal_dim(argument(call, 1, "dim", 0), rank)}
    operands = (without_dims(rank, dims),) * len(slot_specs(call))
    return Factors(operands, (except_dims(rank, dims),))


def _pad(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    pad = argument(call, 1, "pad")
    padded = {rank - 1 - i // 2 for i, amount in enumerate(pad) if amount}
    names = except_dims(rank, padded)
    return Factors((names,), (names,))


def _repeat(call: OpCall) -> Factors:
    """Dimensions that are not repeated may be split; so may those that only repeat a single element."""
    before, after = call.operands[0].shape, shape_of(call.results[0])
    shift = len(after) - len(before)
    stretched = {i for i, size in enumerate(before) if size not in (1, after[i + shift])}
    names = tuple(WHOLE if i in stretched else f"d{i + shift}" for i in range(len(before)))
    return Factors((names,), (except_dims(len(after), {i + shift for i in stretched}),))


def _adapt_repeat(local: OpCall, cut: Cut) -> OpCall:
    after = shape_of(local.results[0])
    before = (1,) * (len(after) - len(local.operands[0].shape)) + local.operands[0].shape
    repeats = argument(local, 1, "repeats")
    changed = tuple(
        repeat if b == 0 else a // b for repeat, a, b in zip(repeats, after, before, strict=True)
    )
    return with_arguments(local, {1: changed})


def _roll(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    names = except_dims(rank, normal_dims(argument(call, 2, "dims"), rank))
    return Factors((names,), (names,))


def _flip(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    dims = argument(call, 1, "dims")
    names = except_dims(rank, normal_dims(dims, rank) if dims else set())
    return Factors((names,), (names,))


def _scatter_piece(call: OpCall) -> Factors:
    """`slice_scatter` and `select_scatter`: whole along their dimension."""
    rank = len(call.operands[0].shape)
    dims = {normal_dim(argument(call, 2, "dim", 0), rank)}
    names = except_dims(rank, dims)
    piece = names if len(slot_specs(call)[1].shape) == rank else without_dims(rank, dims)
    return Factors((names, piece), (names,))


def _select_backward(call: OpCall) -> Factors:
    rank = len(shape_of(call.results[0]))
    dims = {normal_dim(argument(call, 2, "dim", 0), rank)}
    return Factors((without_dims(rank, dims),), (except_dims(rank, dims),))


def _slice_backward(call: OpCall) -> Factors:
    rank = len(shape_of(call.results[0]))
    names = except_dims(rank, {normal_dim(argument(call, 2, "dim", 0), rank)})
    return Factors((names,), (names,))


def _triangle(call: OpCall) -> Factors:
    names = numbered(len(call.operands[0].shape))
    return Factors((names,), (names,))


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


def _diagonal(call: OpCall) -> Factors:
    plane, diagonal = _plane(call, call.operands[0].shape, 2)
    return Factors((plane,), (diagonal,))


def _diagonal_backward(call: OpCall) -> Factors:
    plane, diagonal = _plane(call, shape_of(call.results[0]), 3)
    return Factors((diagonal,), (plane,))


def _diag_embed(call: OpCall) -> Factors:
    plane, diagonal = _plane(call, shape_of(call.results[0]), 2)
    return Factors((diagonal,), (plane,))


def _unfold(call: OpCall) -> Factors:
    rank = len(call.operands[0].shape)
    names = except_dims(rank, {normal_dim(argument(call, 1, "dimension"), rank)})
    return Factors((names,), ((*names, WHOLE),))


def _unfold_backward(call: OpCall) -> Factors:
    rank = len(shape_of(call.results[0]))
    names = except_dims(rank, {normal_dim(argument(call, 2, "dim"), rank)})
    return Factors(((*names, WHOLE),), (names,))


# A shard may be laid out otherwise than the whole (a slice of it, say), so that its view may need a
# copy.
rule(
    aten("view _unsafe_view reshape"),
    reshape_factors,
    adapt=renamed("aten.reshape.default", 1),
    view=True,
    **MOVES,
)
# A shard may have size 1 where the whole has not, and must not be squeezed there.
rule(
    aten("squeeze squeeze.dim squeeze.dims flatten.using_ints unflatten.int"),
    reshape_factors,
    adapt=renamed("aten.reshape.default", 1),
    view=True,
    **MOVES,
)
rule(aten("unsqueeze"), reshape_factors, view=True, **MOVES)
rule(aten("expand broadcast_to"), pointwise, adapt=resized(1), view=True, **MOVES)
rule(aten("permute"), _permute, view=True, **MOVES)
rule(aten("transpose.int"), _transpose, view=True, **MOVES)
rule(aten("t"), _reverse, view=True, **MOVES)
rule(aten("slice.Tensor"), _slice, view=True, **MOVES)
rule(aten("select.int unbind.int"), _select, view=True, **MOVES)
rule(
    aten("split.Tensor split_with_sizes chunk unsafe_chunk unsafe_split.Tensor"),
    _pieces,
    view=True,
    **MOVES,
)
rule(aten("cat"), _cat, **MOVES)
rule(aten("stack"), _stack, **MOVES)
rule(aten("constant_pad_nd"), _pad, linear=((0, 2),))
rule(aten("repeat"), _repeat, adapt=_adapt_repeat, **MOVES)
rule(aten("roll"), _roll, **MOVES)
rule(aten("flip"), _flip, **MOVES)
rule(aten("slice_scatter select_scatter"), _scatter_piece, linear=TOGETHER, monotone=TOGETHER)
rule(aten("slice_backward"), _slice_backward, linear=FIRST, adapt=resized(1))
rule(aten("select_backward"), _select_backward, linear=FIRST, adapt=resized(1))
rule(aten("tril triu"), _triangle, linear=FIRST, adapt=_adapt_triangle, places=(1,))
rule(aten("view_as_complex"), "... 1 -> ...", linear=FIRST, view=True)
rule(aten("view_as_real"), "... -> ... 1", linear=FIRST, view=True)
rule(aten("diagonal"), _diagonal, view=True, **MOVES)
rule(aten("diagonal_backward"), _diagonal_backward, linear=FIRST, adapt=resized(1))
rule(aten("diag_embed"), _diag_embed, linear=FIRST)
rule(aten("unfold"), _unfold, view=True, **MOVES)
rule(aten("unfold_backward"), _unfold_backward, linear=FIRST, adapt=resized(1))
# Views that run whole, or that no graph holds but a test may.
sharing(
    aten("_neg_view _reshape_alias as_strided expand_as lift_fresh movedim.intlist narrow numpy_T")
)
sharing(aten("swapaxes unsafe_split_with_sizes view.dtype view_as"))
