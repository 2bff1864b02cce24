"""weft's ops on a shard of the classes: what a cross-entropy becomes when its classes are split.

On a CPU, rows are worked on a few at a time, so that what is in between stays in the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

# So many elements at a time: half a MiB of float32.
_AT_A_TIME = 2**17
_NONE = 0  # torch's number of the reduction "none"


def sum_exp(x: Tensor, top: Tensor, dim: int) -> Tensor:
    """`weft.sum_exp`: sums of exp(x - top) along `dim`, which stays with one element, as `top` has it."""
    if x.dim() != 2 or dim != 1:
        return (x - top).exp_().sum(dim, keepdim=True)
    sums = torch.empty_like(top)
    for rows in _rows(x):
        torch.sum((x[rows] - top[rows]).exp_(), 1, keepdim=True, out=sums[rows])
    return sums


def class_loss(
    x: Tensor, lse: Tensor, target: Tensor, reduction: int, ignored: int, offset: int
) -> tuple[Tensor, Tensor]:
    """`weft.class_loss`: losses of the targets among this shard's classes, and how many they are.

    Args:
        x: logits of classes `[offset, offset + classes)`, shape [n, classes].
        lse: logarithms of the sums of all classes' exponentials, [n, 1].
        target: whole class numbers, [n].
        reduction: torch's number of "none" or "sum".
        ignored: whole class number that counts for nothing.
        offset: number of the shard's first class.

    Returns:
        The losses, [n], or their sum; the number of targets, where it is a sum, else 0.
    """
    own, place = _own(x, target, ignored, offset)
    losses = (lse - x.gather(1, place)).squeeze(1).masked_fill_(~own, 0)
    if reduction == _NONE:
        return losses, x.new_zeros(())
    return losses.sum(), own.sum().to(x.dtype)


def class_loss_backward(
    grad: Tensor, x: Tensor, lse: Tensor, target: Tensor, reduction: int, ignored: int, offset: int
) -> Tensor:
    """`weft.class_loss_backward`: the gradient of `x`; arguments as in `class_loss`, `grad` of its losses."""
    own, place = _own(x, target, ignored, offset)
    weights = torch.where(target == ignored, 0, grad).to(x.dtype).unsqueeze(1)
    found = torch.empty_like(x)
    for rows in _rows(x):
        torch.sub(x[rows], lse[rows], out=found[rows]).exp_().mul_(weights[rows])
    return found.scatter_add_(1, place, torch.where(own.unsqueeze(1), -weights, 0))


def _own(x: Tensor, target: Tensor, ignored: int, offset: int) -> tuple[Tensor, Tensor]:
    """Which targets are among this shard's classes, [n], and where, [n, 1]; 0 for the others."""
    local = target - offset
    own = (local >= 0) & (local < x.shape[1]) & (target != ignored)
    return own, local.masked_fill_(~own, 0).unsqueeze(1)


def _rows(x: Tensor) -> Iterator[slice]:
    every = x.device.type != "cpu"  # other devices want few launches
    count = max(1, x.shape[0] if every else _AT_A_TIME // max(1, x.shape[1]))
    for start in range(0, x.shape[0], count):
        yield slice(start, start + count)


CLASS_OPS: dict[str, Callable[..., Any]] = {
    "weft.sum_exp": sum_exp,
    "weft.class_loss": class_loss,
    "weft.class_loss_backward": class_loss_backward,
}
