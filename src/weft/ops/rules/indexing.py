"""Reading and writing at indices: embeddings, gather, scatter, advanced indexing."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

from weft.layout import Split
from weft.ops.call import OpCall, Operand, argument, normal_dim, slot_specs
from weft.ops.cost import tensor_bytes
from weft.ops.factors import WHOLE, Dims, Factors, whole_factors
from weft.ops.rule import Cut, Groups, aten, rule
from weft.ops.rules.common import FIRST, except_dims, no_work, numbered

EMBEDDING_SHARD = "weft.embedding_shard"
EMBEDDING_GRADIENT_SHARD = "weft.embedding_dense_backward_shard"


def _adapt_embedding(local: OpCall, cut: Cut) -> OpCall:
    """A row-split table looks up its own rows only: the result is Partial."""
    if cut.signature.operands[0] != Split(0):
        return local
    before, rows = 0, cut.whole.operands[0].shape[0]
    if cut.whole.op == EMBEDDING_SHARD:
        before = argument(cut.whole, 2, "offset", 0)
        rows = argument(cut.whole, 3, "rows", None)
    args = (*local.args[:2], before + cut.operand_range(0, 0)[0], rows)
    return OpCall(EMBEDDING_SHARD, args, (), local.operands, local.results)


def _adapt_embedding_backward(local: OpCall, cut: Cut) -> OpCall:
    if cut.signature.results[0] != Split(0):
        return local
    offset, rows = cut.result_range(0)
    if cut.whole.op == EMBEDDING_GRADIENT_SHARD:
        gradient, indices, _, _, padding, scale = local.args
        offset += argument(cut.whole, 3)
    else:
        gradient, indices, _, padding, scale = local.args
    args = (gradient, indices, rows, offset, padding, scale)
    return OpCall(EMBEDDING_GRADIENT_SHARD, args, (), local.operands, local.results)


def _read_bytes(call: OpCall) -> int:
    """Looking up reads only the rows that it returns."""
    result, *others = call.results[0], *call.operands[1:]
    return sum(tensor_bytes(spec) for spec in (result, result, *others) if spec)


# A result that is looked up in the first operand: that computes nothing, however large the table is.
_look_up = partial(rule, linear=FIRST, traffic=_read_bytes, flops=no_work)


def _index(indices: Any, source: OpCall, rank: int) -> tuple[Dims, list[Dims], Dims]:
    """Factors of `x`, of each index tensor, and of `x[indices]`.

    Indexed dimensions are whole; index tensors broadcast to common dimensions j0, j1, … that stand
    at the first indexed dimension, or in front when a `None` is between indexed ones.
    """
    at = [i for i, value in enumerate(indices) if isinstance(value, Operand)]
    ranks = [len(source.operands[indices[i].index].shape) for i in at]
    common = tuple(f"j{i}" for i in range(max(ranks)))
    x = except_dims(rank, set(at))
    rest = [f"d{i}" for i in range(rank) if i not in at]
    contiguous = at == list(range(at[0], at[-1] + 1))
    place = at[0] if contiguous else 0
    result = (*rest[:place], *common, *rest[place:])
    return x, [common[len(common) - r :] for r in ranks], result


def _masked(call: OpCall) -> Factors | None:
    """The factors of `x[mask] = number`, whose mask goes along the first dimensions of `x`."""
    x, *masks, value = slot_specs(call)
    indices = argument(call, 1)
    if len(indices) != 1 or len(masks) != 1 or masks[0].dtype != "bool" or value.shape:
        return None
    names = numbered(len(x.shape))
    return Factors((names, names[: len(masks[0].shape)], ()), (names,))


def _along(call: OpCall) -> tuple[Dims, Dims]:
    """Factors of `x` and of `index` in gather and scatter.

    The dimension that is indexed is a factor of the index alone. In the others, a smaller index (or
    one smaller than the source) uses the first elements only, so that they go together only where
    all sizes are equal.
    """
    x, index, *source = slot_specs(call)
    dim = normal_dim(argument(call, 1, "dim"), len(x.shape))
    matched = [index.shape, *(spec.shape for spec in source)]
    if len(index.shape) != len(x.shape):  # an empty index may have any rank
        return (WHOLE,) * len(x.shape), (WHOLE,) * len(index.shape)
    if not x.shape:
        return (), ()
    moving = "j" if len({shape[dim] for shape in matched}) == 1 else WHOLE
    others = {i for i, size in enumerate(x.shape) if {shape[i] for shape in matched} != {size}}
    names = except_dims(len(x.shape), others | {dim})
    return names, tuple(moving if i == dim else name for i, name in enumerate(names))


def _index_write(call: OpCall) -> Factors:
    """`index_fill` and `index_copy`: whole along the dimension that is written."""
    rank = len(slot_specs(call)[0].shape)
    x = except_dims(rank, {normal_dim(argument(call, 1, "dim"), rank)})
    index = (WHOLE,) * len(slot_specs(call)[1].shape)
    return Factors((x, index, x)[: len(slot_specs(call))], (x,))


def _adding(call: OpCall) -> Groups:
    includes = dict(call.kwargs).get("include_self", True)
    return ((0, 3),) if argument(call, 4, "reduce") == "sum" and includes else ()


_look_up(aten("embedding"), "v+ e, ... -> ... e", adapt=_adapt_embedding)
_look_up(EMBEDDING_SHARD, "v+ e, ... -> ... e", adapt=_adapt_embedding)


@rule(
    (*aten("embedding_dense_backward"), EMBEDDING_GRADIENT_SHARD),
    linear=FIRST,
    adapt=_adapt_embedding_backward,
    # One addition for each element of the rows that are added to a table.
    flops=lambda call: prod(call.operands[0].shape),
)
def _embedding_backward(call: OpCall) -> Factors:
    """Rows of the table may be split; gradients add up over the indices unless they are scaled by frequency."""
    indices = numbered(len(slot_specs(call)[1].shape))
    shard = call.op == EMBEDDING_GRADIENT_SHARD
    scaled = argument(call, 5 if shard else 4, "scale_grad_by_freq", False)
    marks = frozenset(indices)
    return Factors(
        ((*indices, "e"), indices),
        (("v", "e"),),
        contracted=frozenset() if scaled else marks,
        whole=marks if scaled else frozenset(),
    )


@_look_up(aten("index.Tensor _unsafe_index.Tensor"))
def _index_tensor(call: OpCall) -> Factors:
    if any(spec.dtype in ("bool", "uint8") for spec in call.operands[1:]):
        return whole_factors(call)
    x, indices, result = _index(argument(call, 1), call, len(slot_specs(call)[0].shape))
    return Factors((x, *indices), (result,))


@rule(aten("index_put _unsafe_index_put"), linear=((0, 2),), added=(0,))
def _index_put(call: OpCall) -> Factors:
    """Without accumulation, later writes win: the indices stay whole. A number under a mask is element-wise."""
    accumulate = bool(argument(call, 3, "accumulate", False))
    masked = _masked(call)
    if masked is not None:
        return masked
    if any(spec.dtype in ("bool", "uint8") for spec in slot_specs(call)[1:-1]):
        return whole_factors(call)
    x, indices, piece = _index(argument(call, 1), call, len(slot_specs(call)[0].shape))
    values = piece[len(piece) - len(slot_specs(call)[-1].shape) :]
    written = frozenset(name for name in piece if name.startswith("j"))
    return Factors(
        (x, *indices, values),
        (x,),
        contracted=written if accumulate else frozenset(),
        whole=frozenset() if accumulate else written,
    )


@_look_up(aten("index_select"))
def _index_select(call: OpCall) -> Factors:
    rank = len(slot_specs(call)[0].shape)
    dim = normal_dim(argument(call, 1, "dim"), rank)
    x = except_dims(rank, {dim})
    index = ("j",) * len(slot_specs(call)[1].shape)
    return Factors((x, index), (tuple("j" if i == dim else name for i, name in enumerate(x)),))


@rule(aten("index_add"), linear=((0, 3),), added=(0,))
def _index_add(call: OpCall) -> Factors:
    rank = len(slot_specs(call)[0].shape)
    dim = normal_dim(argument(call, 1, "dim"), rank)
    x = except_dims(rank, {dim})
    # A scalar takes one index, which no rank may lack.
    index = ("j" if rank else WHOLE,) * len(slot_specs(call)[1].shape)
    source = tuple("j" if i == dim else name for i, name in enumerate(x))
    return Factors((x, index, source), (x,), contracted=frozenset("j"))


rule(aten("index_fill.int_Scalar index_copy"), _index_write, linear=((0, 3),))


@_look_up(aten("take"))
def _take(call: OpCall) -> Factors:
    x, index = slot_specs(call)
    names = numbered(len(index.shape))
    return Factors(((WHOLE,) * len(x.shape), names), (names,))


rule(aten("bucketize.Tensor"), "..., 1 -> ...")


@rule(aten("searchsorted.Tensor"))
def _searchsorted(call: OpCall) -> Factors:
    """One sequence for all values; several only with a batch each. Their order may be given too."""
    sequence, values, *sorter = slot_specs(call)
    names = numbered(len(values.shape))
    batch = (WHOLE,) if len(sequence.shape) == 1 else (*names[:-1], WHOLE)
    return Factors((batch, names, *(batch for _ in sorter)), (names,))


@_look_up(aten("gather"))
def _gather(call: OpCall) -> Factors:
    x, index = _along(call)
    return Factors((x, index), (index,))


@rule(aten("scatter.src scatter.value"), linear=((0, 3),))
def _scatter(call: OpCall) -> Factors:
    """Along the dimension that is written, everything stays whole: the last write wins."""
    x, index = _along(call)
    sources = (index,) * (len(slot_specs(call)) - 2)
    return Factors((x, index, *sources), (x,), whole=frozenset("j"))


@rule(aten("scatter_reduce.two"), linear=_adding, added=(0,))
def _scatter_reduce(call: OpCall) -> Factors:
    """A sum that starts from what is there is a `scatter_add`."""
    x, index = _along(call)
    adds = bool(_adding(call))
    contracted, whole = frozenset("j" if adds else ""), frozenset("" if adds else "j")
    return Factors((x, index, index), (x,), contracted, whole)


rule(aten("index_reduce"), _index_write)


@rule(aten("scatter_add"), linear=((0, 3),), added=(0,))
def _scatter_add(call: OpCall) -> Factors:
    x, index = _along(call)
    return Factors((x, index, index), (x,), contracted=frozenset("j"))
