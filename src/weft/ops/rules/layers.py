"""Layers with kernels of their own: fused attention, normalizations, LSTM.

Batch, heads and queries of an attention may be split; every rank sees all keys. Queries that are split under
whole keys are a split sequence (context parallelism as in "The Llama 3 Herd of Models", section 3.3.2):
gradients of keys and values add up over the ranks. A causal mask counts positions from the first query, so that
a rank with later queries runs `weft.attention_rows`, which is told the position of its first one.

`weft.attention_rows(query, key, value, offset, scale=)` is `(output, logsumexp)` of the queries at
positions offset, offset + 1, …, each under a causal mask over `key` and `value`, whose positions count
from 0. `weft.attention_rows_backward(grad, query, key, value, output, logsumexp, offset, scale=)` makes
the gradients of query, key and value that come from these queries.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from weft.layout import Split
from weft.ops.call import (
    OpCall,
    Operand,
    argument,
    slot_specs,
    slots,
    tensor_argument,
    with_arguments,
)
from weft.ops.factors import WHOLE, Dims, Factors, whole_factors
from weft.ops.rule import Adapt, Cut, FindFactors, aten, rule
from weft.ops.rules.common import FIRST, channels, numbered, shape_of
from weft.units import ITEM_SIZE

ROWS, ROWS_BACKWARD = "weft.attention_rows", "weft.attention_rows_backward"


def _by_heads(call: OpCall, query: int) -> Factors:
    """Batch and heads of every tensor of rank 3 or 4; heads as in `_by_queries`."""
    shape = call.operands[query].shape

    def dims(tensor: tuple[int, ...]) -> Dims:
        if len(tensor) not in (3, 4) or tensor[0] not in (1, shape[0]):
            return (WHOLE,) * len(tensor)
        return ("b", "h", *(WHOLE,) * (len(tensor) - 2))

    return Factors(
        tuple(dims(spec.shape) for spec in slot_specs(call)),
        tuple(dims(shape_of(spec)) for spec in call.results),
        contracted=frozenset("h" if query else ""),
    )


def _fused(query: int, dropout: int) -> FindFactors:
    """Factors of a fused attention op; with dropout in the kernel, its masks depend on the shapes: all whole."""

    def factors(call: OpCall) -> Factors:
        if argument(call, dropout, "dropout_p", 0.0):
            return whole_factors(call)
        return _by_heads(call, query)

    return factors


def _by_queries(first: int, results: tuple[str, ...], contracted: str) -> FindFactors:
    """Factors of the CPU kernel and of causal rows; `first` counts the tensors before the query.

    Where there are fewer heads of keys than of queries, groups of heads go together: the ranks must
    divide both numbers. A single head of keys serves every head of queries.
    """

    def factors(call: OpCall) -> Factors:
        # Masks of dropout in a kernel depend on the shapes, so that all stays whole.
        if not _is_rows(call) and bool(argument(call, 6 if first else 3, "dropout_p", 0.0)):
            return whole_factors(call)
        leading = ("b h q d",) * first + ("b h q d", "b h k d", "b h k d")
        leading += ("b h q d", "b h q") if first else ()
        operands = [tuple(term.split()) for term in leading]
        operands += [
            ("b", "h", "q", "k")[4 - len(spec.shape) :] for spec in slot_specs(call)[len(leading) :]
        ]
        return Factors(
            tuple(operands),
            tuple(tuple(term.split()) for term in results),
            contracted=frozenset(contracted.split()),
            whole=_whole(call, first),
        )

    return factors


def _whole(call: OpCall, first: int) -> frozenset[str]:
    """Depth; keys, but for the gradients of an attention that is not causal; queries under a second mask."""
    if not _causal(call, first):
        return frozenset("d" if first else "dk")
    masked = len(slot_specs(call)) > (6 if first else 3)
    return frozenset("dkq" if masked else "dk")


def _causal(call: OpCall, first: int) -> bool:
    return _is_rows(call) or bool(argument(call, 7 if first else 4, "is_causal", False))


def _is_rows(call: OpCall) -> bool:
    return call.op in (ROWS, ROWS_BACKWARD)


def _from_first_query(first: int) -> Adapt:
    """Under a causal mask, queries that are split run as rows that begin at a position of their own."""
    query, op, arity = first, ROWS_BACKWARD if first else ROWS, 6 if first else 3

    def adapt(local: OpCall, cut: Cut) -> OpCall:
        operand = slots(cut.whole)[query]
        if not _causal(local, first) or cut.signature.operands[operand] != Split(2):
            return local
        before = argument(local, arity) if _is_rows(local) else 0
        offset = before + cut.operand_range(operand, 2)[0]
        kwargs = tuple((name, value) for name, value in local.kwargs if name == "scale")
        return OpCall(op, (*local.args[:arity], offset), kwargs, local.operands, local.results)

    return adapt


def _attention_flops(query: int, products: int) -> Callable[[OpCall], int]:
    """`products` matrix products of (queries, keys, depth) for each batch and head, as if nothing were masked."""

    def flops(call: OpCall) -> int:
        q, k = tensor_argument(call, query), tensor_argument(call, query + 1)
        assert q is not None
        assert k is not None
        return 2 * products * prod(q.shape) * k.shape[-2]

    return flops


rule(
    (*aten("_scaled_dot_product_flash_attention_for_cpu"), ROWS),
    _by_queries(0, ("b h q d", "b h q"), ""),
    flops=_attention_flops(0, 2),
    adapt=_from_first_query(0),
)
rule(
    (*aten("_scaled_dot_product_flash_attention_for_cpu_backward"), ROWS_BACKWARD),
    _by_queries(1, ("b h q d", "b h k d", "b h k d"), "h q k"),
    linear=FIRST,
    flops=_attention_flops(1, 5),
    adapt=_from_first_query(1),
)
for _name, _forward, _backward in (
    ("flash_attention", 3, 10),
    ("efficient_attention", 5, 9),
    ("cudnn_attention", 5, 13),
    ("fused_attention_overrideable", 4, 12),
):
    rule(
        aten(f"_scaled_dot_product_{_name}"),
        _fused(0, _forward),
        flops=_attention_flops(0, 2),
    )
    rule(
        aten(f"_scaled_dot_product_{_name}_backward"),
        _fused(1, _backward),
        linear=FIRST,
        flops=_attention_flops(1, 5),
    )


def _normalized(call: OpCall, shape: Any, contracted: bool) -> Factors:
    """Layer norm and RMS norm: leading dimensions are a batch, those of `shape` whole."""
    rank = max(len(spec.shape) for spec in call.operands)
    batch = rank - len(shape)

    def dims(tensor: tuple[int, ...]) -> Dims:
        if len(tensor) != rank:
            return (WHOLE,) * len(tensor)
        return tuple(f"d{i}" if i < batch else WHOLE for i in range(rank))

    return Factors(
        tuple(dims(spec.shape) for spec in slot_specs(call)),
        tuple(dims(shape_of(spec)) for spec in call.results),
        contracted=frozenset(numbered(batch)) if contracted else frozenset(),
    )


def _group_norm_of(call: OpCall, groups: int, backward: bool) -> Factors:
    """Split by batch, or by groups of channels: the channels of a group stay together."""

    def dims(shape: tuple[int, ...]) -> Dims:
        named = channels(shape, channel="g")
        return tuple(name if name in "ng" else WHOLE for name in named)

    return Factors(
        tuple(dims(spec.shape) for spec in slot_specs(call)),
        tuple(dims(shape_of(spec)) for spec in call.results),
        contracted=frozenset("n") if backward else frozenset(),
        hidden=(("g", groups),),
    )


def _adapt_group_norm(x: int, sizes: int) -> Any:
    """N, C, HxW, group stand from position `sizes` on; the input tensor at position `x`."""

    def adapt(local: OpCall, cut: Cut) -> OpCall:
        operand = local.args[x]
        assert isinstance(operand, Operand)
        batch, channels = local.operands[operand.index].shape[:2]
        whole_channels, groups = local.args[sizes + 1], local.args[sizes + 3]
        assert isinstance(whole_channels, int)
        assert isinstance(groups, int)
        local_groups = groups * channels // whole_channels
        changes = {sizes: batch, sizes + 1: channels, sizes + 3: local_groups}
        return with_arguments(local, changes)

    return adapt


rule(
    aten("native_layer_norm _fused_rms_norm"),
    lambda call: _normalized(call, argument(call, 1, "normalized_shape"), contracted=False),
)
rule(
    aten("native_layer_norm_backward _fused_rms_norm_backward"),
    lambda call: _normalized(call, argument(call, 2, "normalized_shape"), contracted=True),
    linear=FIRST,
)
rule(
    aten("native_group_norm"),
    lambda call: _group_norm_of(call, argument(call, 6, "group"), backward=False),
    adapt=_adapt_group_norm(0, 3),
)
rule(
    aten("native_group_norm_backward"),
    lambda call: _group_norm_of(call, argument(call, 8, "group"), backward=True),
    linear=FIRST,
    adapt=_adapt_group_norm(1, 5),
)


# BatchNorm: fused where the batch is whole, and the parts that it is decomposed into where it is split.
#
# The parts (`weft.compiler.decompositions.batch_norm`): `weft.batch_moments(x)` are sums for each channel, which
# ranks add up; `weft.batch_statistics` makes mean, variance and running statistics of them;
# `aten.native_batch_norm` normalizes with these. Backward, `weft.batch_norm_sums` are what ranks add
# up, and `weft.batch_norm_gradient` reads.


# Positions of an image on a CPU: from so many on, statistics of each image and channel come first (2
# to 5 times faster); below so many, the backward runs with the channels last (4 to 8 times faster).
MANY_POSITIONS, FEW_POSITIONS = 64, 8


def _batch_norm_of(call: OpCall, training: bool, backward: bool) -> Factors:
    """Channels may be split; batch and positions only where statistics are not taken over them."""
    results = tuple(
        channels(shape) if shape != (0,) else (WHOLE,) for shape in map(shape_of, call.results)
    )
    operands = tuple(
        channels(spec.shape) if spec.shape != (0,) else (WHOLE,) for spec in slot_specs(call)
    )
    over = frozenset(name for dims in operands for name in dims if name not in ("c", WHOLE))
    return Factors(
        operands,
        results,
        contracted=over if backward and not training else frozenset(),
        whole=over if training else frozenset(),
    )


def _sums(call: OpCall) -> Factors:
    """Two numbers for each channel, [2, C], are added up over batch and positions."""
    operands = tuple(channels(spec.shape) for spec in slot_specs(call))
    over = frozenset(name for dims in operands for name in dims if name != "c")
    return Factors(operands, ((WHOLE, "c"),), contracted=over)


rule(
    aten("_native_batch_norm_legit_no_training"),
    lambda call: _batch_norm_of(call, training=False, backward=False),
)
rule(
    aten("native_batch_norm _native_batch_norm_legit_functional"),
    lambda call: _batch_norm_of(call, bool(argument(call, 5, "training")), backward=False),
)
rule(
    aten("native_batch_norm_backward"),
    lambda call: _batch_norm_of(call, bool(argument(call, 7, "train")), backward=True),
    linear=FIRST,
)
rule("weft.batch_moments", _sums)


@rule("weft.batch_statistics")
def _statistics(call: OpCall) -> Factors:
    _, *running = slot_specs(call)
    results = tuple(("c",) if spec else () for spec in call.results)
    return Factors(((WHOLE, "c"), *(("c",) for _ in running)), results)


rule("weft.batch_norm_sums", _sums, linear=FIRST)
# Linear in the gradient and in the sums made of it, together; it rounds no more than the fused op.


@rule("weft.batch_norm_gradient", linear=((0, 5),), lossy=True)
def _gradient(call: OpCall) -> Factors:
    *operands, _ = (channels(spec.shape) for spec in slot_specs(call))
    return Factors((*operands, (WHOLE, "c")), (operands[0],))


# A layer of an LSTM over a whole sequence, and its backward: split by the batch, else whole.
#
# Arguments of `weft.lstm`: input [time, n, inputs], weights [4·hidden, inputs] and [4·hidden, hidden],
# two biases [4·hidden] or None, first state and cell [n, hidden], whether time runs backward, whether a
# backward follows. Results: states [time, n, hidden], last state, last cell, and what is saved for the
# backward (uint8), which only the kernel understands. `weft.lstm_backward` takes the gradients of the
# first three (or None), then all operands and results of the forward; it makes the gradients of the
# input, of both weights, of both biases, of first state and cell.


LSTM, LSTM_BACKWARD = "weft.lstm", "weft.lstm_backward"
# The result that is of use to the backward alone.
SAVED = 3


def saved_bytes(steps: int, inputs: int, hidden: int, dtype: str, fused: bool) -> int:
    """Bytes that a layer saves of one sample for its backward; of oneDNN (`fused`), its workspace.

    The workspace is that on processors with AVX-512, without the rounding to pages (`workspace_bytes`); on others it
    is a little different. Without oneDNN, gates and cells are saved.
    """
    if not fused:
        return 5 * steps * hidden * ITEM_SIZE[dtype]
    return sum(_regions(steps, inputs, hidden, ITEM_SIZE[dtype]))


def workspace_bytes(steps: int, batch: int, inputs: int, hidden: int, dtype: str) -> int:
    """Bytes of the workspace that oneDNN saves of `batch` samples: regions of whole pages."""
    regions = _regions(steps, inputs, hidden, ITEM_SIZE[dtype])
    return sum(-(-batch * region // _PAGE) * _PAGE for region in regions)


_PAGE = 4096


def _regions(steps: int, inputs: int, hidden: int, size: int) -> tuple[int, ...]:
    """Bytes of one sample in each region of the workspace: states, cells, their gradients, gates."""
    widest = max(inputs, hidden)
    states = [2 * _row(widest, size), *[2 * _row(widest, 4)] * 2]
    states += [8 * hidden, 8 * hidden if size == 4 else 4 * hidden]
    gates = [_row(4 * hidden, size), _row(hidden, size)]
    return (*((steps + 1) * each for each in states), *(steps * each for each in gates))


def _row(width: int, size: int) -> int:
    """Bytes of a row of oneDNN's workspace: whole cache lines, and no multiple of 256 elements."""
    line = 64 // size
    width = -(-width // line) * line
    return (width if width % 256 else width + line) * size


def _lstm_flops(call: OpCall) -> int:
    """Two products for each time step and sample: with the input, and with the last state."""
    x, of_input, of_state = (spec.shape for spec in call.operands[:3])
    return 2 * prod(x[:2]) * of_state[0] * (of_input[1] + of_state[1])


def _lstm_backward_flops(call: OpCall) -> int:
    x, of_input, of_state = map(shape_of, call.results[:3])
    return 4 * prod(x[:2]) * of_state[0] * (of_input[1] + of_state[1])


_LSTM_FORWARD = "t! n i!, g! i!, g! h!, g!, g!, n h!, n h!"
_LSTM_STATES = "t! n h!, n h!, n h!"
rule(
    LSTM,
    f"{_LSTM_FORWARD} -> {_LSTM_STATES}, n k!",
    kept=(SAVED,),
    readers=(LSTM_BACKWARD,),
    flops=_lstm_flops,
)
rule(
    LSTM_BACKWARD,
    f"{_LSTM_STATES}, {_LSTM_FORWARD}, {_LSTM_STATES}, n+ k! -> t! n i!, g! i!, g! h!, g!, g!, n h!, n h!",
    linear=((0, 1, 2),),
    flops=_lstm_backward_flops,
)
