"""Causal attention of a part of the queries (`weft.ops.rules.layers.attention`), by torch's fused kernels.

A kernel's causal mask begins at its first query. So the keys are cut where the rank's queries begin:
those before are seen by every query, without a mask, and from there on the mask is the kernel's own.
The two results are joined by their log-sum-exps, with which the kernel's backward is exact for each
part (as blocks are in "FlashAttention", arXiv 2205.14135, section 3.1). Nothing of the size of queries
times keys is made, and keys behind the last query are not read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.runtime.kernels.dense_operands import dense_op

_FULL = (torch.float32, torch.float64)


def attention_rows(
    query: Tensor, key: Tensor, value: Tensor, offset: int, *, scale: float | None = None
) -> tuple[Tensor, Tensor]:
    """`weft.attention_rows`: causal attention of the queries at positions `[offset, offset + rows)`.

    Args:
        query: [batch, heads, rows, depth].
        key: [batch, key heads, keys, depth], from position 0; key heads divide heads.
        value: as `key`.
        offset: position of the first query; queries behind the last key see all of them.
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
    """The parts one after the other, then zeros for the keys that are left; in memory as the kernel's results."""
    batch, heads, keys, depth = key.shape
    whole = key.new_empty(batch, keys, heads, depth).transpose(1, 2)
    end = 0
    for part in parts:
        begin, end = end, end + part.shape[2]
        whole[:, :, begin:end] = part
    whole[:, :, end:] = 0
    return whole


def _own_keys(query: Tensor, key: Tensor, offset: int) -> tuple[int, int]:
    """The range of keys at the positions of the queries."""
    keys = key.shape[2]
    return min(offset, keys), min(offset + query.shape[2], keys)


ATTENTION_OPS: dict[str, Callable[..., Any]] = {
    "weft.attention_rows": attention_rows,
    "weft.attention_rows_backward": attention_rows_backward,
}
