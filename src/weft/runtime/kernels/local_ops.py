"""weft's own ops on local tensors (docs/design/ops.md), in plain torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import UserError
from weft.ops.kernel_memory import slice_copies
from weft.runtime.kernels.dense_operands import MATMUL_OPS, dense_op
from weft.runtime.kernels.layer_ops import NORM_OPS, RECURRENT_OPS
from weft.runtime.kernels.loss_ops import LOSS_OPS
from weft.runtime.kernels.own_ops import EXPERT_OPS, PASS_OPS, TIME_OPS
from weft.runtime.kernels.window_ops import WINDOW_OPS

# Causal attention of a part of the queries (`weft.ops.rules.layers`), by torch's fused kernels.
#
# A kernel's causal mask begins at its first query. So the keys are cut where the rank's queries begin:
# those before are seen by every query, without a mask, and from there on the mask is the kernel's own.
# The two results are joined by their log-sum-exps, with which the kernel's backward is exact for each
# part (as blocks are in "FlashAttention", arXiv 2205.14135, section 3.1). Nothing of the size of queries
# times keys is made, and keys after the last query are not read.


_FULL = (torch.float32, torch.float64)


def attention_rows(
    query: Tensor, key: Tensor, value: Tensor, offset: int, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`weft.attention_rows`: causal attention of the queries at positions `[offset, offset + rows)`.

    Args:
        query: [batch, heads, rows, depth].
        key: [batch, key heads, keys, depth], from position 0; key heads divide heads.
        offset: position of the first query; queries after the last key see all of them.
        scale: of the scores; None for 1 / sqrt(depth).

    Returns:
        The output, shaped as `query`, and the logarithms of the sums of exponentials, [batch, heads,
        rows].
    """
    first, end = _own_keys(query, key, offset)
    if first == end:
        return _forward(query, key, value, False, scale)
    near, near_sums = _forward(query, key[:, :, first:end], value[:, :, first:end], True, scale)
    if not first:
        return near, near_sums
    far, far_sums = _forward(query, key[:, :, :first], value[:, :, :first], False, scale)
    weight = (far_sums - near_sums).sigmoid_().unsqueeze(-1)
    sums = torch.logaddexp(near_sums, far_sums)
    if near.dtype in _FULL:
        return near.lerp_(far, weight), sums
    return torch.lerp(near.float(), far.float(), weight).to(near.dtype), sums


def attention_rows_backward(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    logsumexp: Tensor,
    offset: int,
    *,
    scale: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """`weft.attention_rows_backward`: the gradients of query, key and value; arguments as in `attention_rows`."""
    first, end = _own_keys(query, key, offset)
    saved = (output, logsumexp)

    def backward(keys: slice, causal: bool) -> Any:
        parts = (query, key[:, :, keys], value[:, :, keys])
        return _BACKWARD(grad, *parts, *saved, 0.0, causal, scale=scale)

    if first == end:
        whole: tuple[Tensor, Tensor, Tensor] = backward(slice(None), False)
        return whole
    of_query, *near = backward(slice(first, end), True)
    if not first and end == key.shape[2]:
        return of_query, near[0], near[1]
    if first:
        more, *far = backward(slice(first), False)
        of_query += more
        del more
    else:
        far = [one[:, :, :0] for one in near]
    of_key, of_value = (_along_keys(key, parts) for parts in zip(far, near, strict=True))
    return of_query, of_key, of_value


_FORWARD = dense_op("aten._scaled_dot_product_flash_attention_for_cpu.default")
_BACKWARD = dense_op("aten._scaled_dot_product_flash_attention_for_cpu_backward.default")


def _forward(
    query: Tensor, key: Tensor, value: Tensor, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    found: tuple[Tensor, Tensor] = _FORWARD(query, key, value, 0.0, causal, scale=scale)
    return found


def _along_keys(key: Tensor, parts: tuple[Tensor, ...]) -> Tensor:
    batch, heads, keys, depth = key.shape
    whole = key.new_empty(batch, keys, heads, depth).transpose(1, 2)
    end = 0
    for part in parts:
        begin, end = end, end + part.shape[2]
        whole[:, :, begin:end] = part
    whole[:, :, end:] = 0
    return whole


def _own_keys(query: Tensor, key: Tensor, offset: int) -> tuple[int, int]:
    keys = key.shape[2]
    return min(offset, keys), min(offset + query.shape[2], keys)


def slice_(x: Tensor, dim: int, offset: int, length: int) -> Tensor:
    """`weft.slice`: the block `[offset, offset + length)` of `x` along `dim`; a view or a copy as plans count it.

    Contiguous because some of torch's kernels read saved statistics as if they were:
    native_layer_norm_backward takes `mean` and `rstd` by their pointers.
    """
    part = x.narrow(dim, offset, length)
    if slice_copies(x.shape, dim, length):
        return part.clone(memory_format=torch.contiguous_format)
    return part.contiguous()


def pad(x: Tensor, dim: int, offset: int, length: int, around: float = 0) -> Tensor:
    """`weft.pad`: `around` of size `length` along `dim` with `x` at `offset`."""
    shape = [*x.shape[:dim], length, *x.shape[dim + 1 :]]
    whole = x.new_full(shape, around)
    whole.narrow(dim, offset, x.shape[dim]).copy_(x)
    return whole


def keep(x: Tensor, kept: bool, instead: float = 0) -> Tensor:
    """`weft.keep`: `x` where `kept`, `instead` elsewhere, so that reducing over the ranks gives `x`.

    The default is for sums.
    """
    return x if kept else torch.full_like(x, instead)


def hint(x: Tensor, sbp: Any = None) -> Tensor:
    """`weft.hint`: the identity; its SBP was for the compiler."""
    return x


def checked(x: Tensor, info: Tensor, name: str, matrix: bool) -> Tensor:
    """`weft.checked`: `x`, unless a factorization failed.

    Args:
        info: its error codes, int32, one for each matrix; 0 is success.
        name: of the function that the user called, such as "torch.linalg.inv".
        matrix: true if `x` belongs to one matrix; else elements of the batch count from the first
            that this rank holds.

    Raises:
        torch.linalg.LinAlgError: with torch's own message.
    """
    torch.ops.aten._linalg_check_errors.default(info.contiguous(), name, is_matrix=matrix)
    return x


def lstsq(a: Tensor, b: Tensor, rcond: float | None, driver: str) -> tuple[Tensor, ...]:
    """`weft.lstsq`: solution, residuals, ranks and singular values; those that a driver does not make are empty."""
    return tuple(torch.linalg.lstsq(a, b, rcond=rcond, driver=driver))


def required(x: Tensor, condition: Tensor, text: str) -> Tensor:
    """`weft.required`: `x`, where the step may continue.

    Raises:
        UserError: the condition is false.
    """
    if not bool(condition):
        raise UserError(text)
    return x


def blank(like: Sequence[Tensor], made: Sequence[Any], op: str) -> Any:
    """`weft.blank`: what a rank without elements makes, on the device of `like[0]`.

    Args:
        like: the operands that the op would have had.
        made: (shape, dtype, value) of each result; None for one that is not a tensor.
    """
    results = tuple(
        one and torch.full(one[0], one[2], dtype=one[1], device=like[0].device) for one in made
    )
    return results if len(results) > 1 else results[0]


def embedding_shard(
    weight: Tensor, indices: Tensor, offset: int, table_rows: int | None = None
) -> Tensor:
    """`weft.embedding_shard`: rows of a row-split embedding; zeros for indices outside the shard.

    Args:
        weight: rows `[offset, offset + len(weight))` of the whole table.
        table_rows: rows of the whole table; None if indices are not checked.

    Returns:
        Shape `[*indices.shape, weight.shape[1]]`.

    Raises:
        IndexError: an index is not a row of the table (on CUDA: an assertion of the device).
    """
    if table_rows is not None and indices.numel():
        least, largest = torch.aminmax(indices)
        if indices.device.type != "cpu":  # without waiting for the device
            torch._assert_async((least >= 0) & (largest < table_rows))
        elif int(least) < 0 or int(largest) >= table_rows:
            raise IndexError(
                f"index out of range: an embedding of {table_rows} rows is read at {int(least)} to {int(largest)}"
            )
    rows, width = weight.shape
    if not rows:
        return weight.new_zeros((*indices.shape, width))
    local = indices - offset
    outside = (local < 0) | (local >= rows)
    found: Tensor = torch.ops.aten.embedding.default(weight, local.masked_fill(outside, 0))
    return found.masked_fill_(outside.unsqueeze(-1), 0)


def embedding_dense_backward_shard(
    grad: Tensor, indices: Tensor, rows: int, offset: int, padding_idx: int, scale: bool
) -> Tensor:
    """`weft.embedding_dense_backward_shard`: the gradient of a row-split embedding's shard.

    Args:
        padding_idx: whole number of the row that gets no gradient, or a negative number.
        scale: true if gradients are divided by how often their index occurs.

    Returns:
        Shape `[rows, width]`.
    """
    local = indices - offset
    outside = (local < 0) | (local >= rows)
    if padding_idx >= 0:
        outside |= indices == padding_idx
    # One row more than the shard has takes what is outside; as the padding row it gets no
    # gradient.
    local = local.masked_fill(outside, rows)
    whole: Tensor = torch.ops.aten.embedding_dense_backward.default(
        grad, local, rows + 1, rows, scale
    )
    return whole[:rows]


def nll_loss_shard(
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    offset: int,
) -> tuple[Tensor, Tensor]:
    """`weft.nll_loss_shard`: the losses of the targets among this shard's classes, and their total weight.

    Args:
        scores: log-probabilities of classes `[offset, offset + classes)`: `[classes]`, `[n,
            classes]` or `[n, classes, y, x]`.
        target: whole class numbers, the shape of `scores` without the classes.
        weight: of the shard's classes, `[classes]`, or None.
    """
    forward = _of_rank(scores, "nll_loss_forward", "nll_loss2d_forward")
    own = _own_classes(scores, target, ignore_index, offset)
    total, total_weight = forward(scores, own, weight, reduction, _IGNORED)
    return total, total_weight


def nll_loss_backward_shard(
    grad: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
    offset: int,
) -> Tensor:
    """`weft.nll_loss_backward_shard`: the gradient of this shard's scores; arguments as in `nll_loss_shard`."""
    backward = _of_rank(scores, "nll_loss_backward", "nll_loss2d_backward")
    own = _own_classes(scores, target, ignore_index, offset)
    # The kernel for images wants a gradient that is contiguous, and makes one like the scores.
    like = scores.contiguous()
    found: Tensor = backward(grad, like, own, weight, reduction, _IGNORED, total_weight)
    return found


_IGNORED = -100


def _own_classes(scores: Tensor, target: Tensor, ignore_index: int, offset: int) -> Tensor:
    """Targets counted from the shard's first class; `_IGNORED` for those of other shards."""
    classes = scores.shape[min(1, scores.dim() - 1)]
    outside = (target < offset) | (target >= offset + classes) | (target == ignore_index)
    return (target - offset).masked_fill_(outside, _IGNORED)


def _of_rank(scores: Tensor, flat: str, image: str) -> Callable[..., Any]:
    op: Callable[..., Any] = getattr(torch.ops.aten, image if scores.dim() == 4 else flat).default
    return op


# `weft.uniform` is missing: its numbers depend on seed and step, which the executor passes
# (`weft.runtime.random`).
LOCAL_OPS: dict[str, Callable[..., Any]] = {
    "weft.slice": slice_,
    "weft.pad": pad,
    "weft.keep": keep,
    "weft.hint": hint,
    "weft.blank": blank,
    "weft.checked": checked,
    "weft.required": required,
    "weft.lstsq": lstsq,
    "weft.embedding_shard": embedding_shard,
    "weft.embedding_dense_backward_shard": embedding_dense_backward_shard,
    "weft.nll_loss_shard": nll_loss_shard,
    "weft.nll_loss_backward_shard": nll_loss_backward_shard,
    "weft.attention_rows": attention_rows,
    "weft.attention_rows_backward": attention_rows_backward,
    **EXPERT_OPS,
    **LOSS_OPS,
    **MATMUL_OPS,
    **NORM_OPS,
    **WINDOW_OPS,
    **PASS_OPS,
    **RECURRENT_OPS,
    **TIME_OPS,
}
