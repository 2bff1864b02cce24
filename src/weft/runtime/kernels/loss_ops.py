"""Kernels of losses: cross-entropy whole and on shards of the classes, and CTC.

On a CPU, the kernels process a few rows at a time, or a few columns of a column-major tensor,
so that temporaries stay in the cache.

With few rows and many classes, the time goes into the gradient's product that makes the weight's. It is
oneDNN's, and takes a third less, where the gradient is laid out by columns. So the scores are
column-major too (`weft.class_scores`): the gradient has the same strides, and nothing is transposed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.ir.alias import BACKWARD, SOFTMAX
from weft.ops.rules.losses import NONE
from weft.ops.weft_ops import ELEMENTS_AT_A_TIME
from weft.runtime.kernels.dense_operands import large_mm, onednn_is_faster

# Numbers of rows for which columns were measured to be faster (with 256 they are not), and the least
# number of columns.
_FEW_ROWS, _MANY_COLUMNS = range(32, 129), 2**14


def class_scores(x: Tensor, weight: Tensor) -> Tensor:
    """`weft.class_scores`: `x @ weight`, which only these ops read; in memory by columns where that pays."""
    if not (x.device.type == "cpu" and x.dtype == torch.float32 and onednn_is_faster()):
        return torch.mm(x, weight)
    if len(x) in _FEW_ROWS and weight.shape[1] >= _MANY_COLUMNS and weight.stride(0) == 1:
        return large_mm(weight.t(), x.t()).t()
    return large_mm(x, weight)


def sum_exp(x: Tensor, top: Tensor, dim: int) -> Tensor:
    """`weft.sum_exp`: sums of exp(x - top) along `dim`, which stays with one element, as `top` has it."""
    if x.dim() != 2 or dim != 1:
        return (x - top).exp_().sum(dim, keepdim=True)
    sums = torch.zeros_like(top)
    for rows, columns in _pieces(x):
        sums[rows] += (x[rows, columns] - top[rows]).exp_().sum(1, keepdim=True)
    return sums


def class_loss(
    x: Tensor, lse: Tensor, target: Tensor, reduction: int, ignored: int, offset: int
) -> tuple[Tensor, Tensor]:
    """`weft.class_loss`: losses of the targets among this shard's classes, and how many they are.

    Args:
        x: logits of classes `[offset, offset + classes)`, shape [n, classes].
        lse: logarithms of the sums of all classes' exponentials, [n, 1].
        target: whole class numbers, [n].

    Returns:
        The losses, [n], or their sum; the number of targets, where it is a sum, else 0.
    """
    own, place = _own(x, target, ignored, offset)
    losses = (lse - x.gather(1, place)).squeeze(1).masked_fill_(~own, 0)
    if reduction == NONE:
        return losses, x.new_zeros(())
    return losses.sum(), own.sum().to(x.dtype)


def class_loss_backward(
    grad: Tensor, x: Tensor, lse: Tensor, target: Tensor, reduction: int, ignored: int, offset: int
) -> Tensor:
    """`weft.class_loss_backward`: the gradient of `x`; arguments as in `class_loss`, `grad` of its losses.

    It is in memory as `x` does.
    """
    own, place = _own(x, target, ignored, offset)
    weights = torch.where(target == ignored, 0, grad).to(x.dtype).unsqueeze(1)
    found = torch.empty_like(x)
    for rows, columns in _pieces(x):
        piece = found[rows, columns]
        torch.sub(x[rows, columns], lse[rows], out=piece).exp_().mul_(weights[rows])
    return found.scatter_add_(1, place, torch.where(own.unsqueeze(1), -weights, 0))


def _own(x: Tensor, target: Tensor, ignored: int, offset: int) -> tuple[Tensor, Tensor]:
    """The targets that are among this shard's classes, as a mask [n], and their places, [n, 1]; 0 for the others."""
    local = target - offset
    own = (local >= 0) & (local < x.shape[1]) & (target != ignored)
    return own, local.masked_fill_(~own, 0).unsqueeze(1)


def _pieces(x: Tensor) -> Iterator[tuple[slice, slice]]:
    every = slice(None)
    if x.stride(0) == 1 < x.stride(1):
        yield from ((every, columns) for columns in rows_at_a_time(x.t()))
    else:
        yield from ((rows, every) for rows in rows_at_a_time(x))


def rows_at_a_time(x: Tensor) -> Iterator[slice]:
    """Slices of the rows of `x`, [n, classes], that make up all of them; few rows each on a CPU."""
    every = x.device.type != "cpu"  # other devices want few launches
    count = max(1, x.shape[0] if every else ELEMENTS_AT_A_TIME // max(1, x.shape[1]))
    for start in range(0, x.shape[0], count):
        yield slice(start, start + count)


_LOSS = torch.ops.aten.nll_loss_backward.default
_CTC = torch.ops.aten._ctc_loss.Tensor
_CTC_BACKWARD = torch.ops.aten._ctc_loss_backward.Tensor
_SOFTMAX = torch.ops.aten._log_softmax_backward_data.out
_LOG_SOFTMAX = torch.ops.aten._log_softmax.default
_LOG_SOFTMAX_OUT = torch.ops.aten._log_softmax.out


def cross_entropy_backward(
    grad: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total: Tensor,
    over: bool = False,
) -> Tensor:
    """`weft.cross_entropy_backward`: the gradient of the logits, by torch's kernels on a few rows at a time.

    Args:
        grad: of the losses, [n], or of their sum, a number.
        scores: log-probabilities, [n, classes].
        weight: of the classes, [classes], or None.
        over: true if the result takes the memory of `scores`, which nobody reads later.

    Returns:
        Shape [n, classes].
    """
    found = scores if over else torch.empty_like(scores)
    for rows in rows_at_a_time(scores):
        some, of_rows = scores[rows], grad[rows] if grad.dim() else grad
        # Dense, but of a few rows: it stays in the cache.
        dense = _LOSS(of_rows, some, target[rows], weight, reduction, ignored, total)
        _SOFTMAX(dense, some, 1, scores.dtype, out=found[rows])
        del dense  # before the next one is made
    return found


def log_softmax_over(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    """`aten._log_softmax` of a tensor on a CPU, in its memory where that is dense."""
    if not x.is_contiguous() or half_to_float:
        made: Tensor = _LOG_SOFTMAX(x, dim, half_to_float)
        return made
    found: Tensor = _LOG_SOFTMAX_OUT(x, dim, False, out=x)
    return found


def ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int,
    zero_infinity: bool,
) -> tuple[Tensor, Tensor]:
    """`weft.ctc_loss`: losses, and the logarithms of sums over prefixes, which the backward reads.

    Args:
        log_probs: [steps, n, classes].
        targets: class numbers, [n, s].
        input_lengths, target_lengths: [n], integers.
        zero_infinity: for the backward.

    Returns:
        Losses [n]; sums [n, steps, 2 s + 1], -inf where there are none.
    """
    lengths = input_lengths, target_lengths
    losses, found = _CTC(log_probs, targets, *lengths, blank, zero_infinity)
    whole = found.new_full((*found.shape[:2], 2 * targets.shape[1] + 1), -torch.inf)
    steps = torch.arange(found.shape[1], device=found.device)[:, None]
    places = torch.arange(found.shape[2], device=found.device)
    inputs, ends = (one.to(found.device)[:, None, None] for one in lengths)
    made = (steps < inputs) & (places < 2 * ends + 1)
    whole[..., : found.shape[2]] = found.masked_fill(~made, -torch.inf)
    return losses, whole


def ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    losses: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool,
) -> Tensor:
    """`weft.ctc_loss_backward`: the gradient of `log_probs`, from that of the losses, [n]."""
    width = 2 * int(target_lengths.max()) + 1
    saved = losses, log_alpha[..., :width].contiguous(), blank, zero_infinity
    lengths = input_lengths, target_lengths
    found: Tensor = _CTC_BACKWARD(grad.contiguous(), log_probs, targets, *lengths, *saved)
    return found


# Ops that write their result over an operand (`weft.ir.alias`), by the op whose place it takes.
OVER_OPS: dict[str, Callable[..., Tensor]] = {
    SOFTMAX: log_softmax_over,
    BACKWARD: partial(cross_entropy_backward, over=True),
}


LOSS_OPS: dict[str, Callable[..., Any]] = {
    "weft.class_scores": class_scores,
    "weft.sum_exp": sum_exp,
    "weft.class_loss": class_loss,
    "weft.class_loss_backward": class_loss_backward,
    "weft.cross_entropy_backward": cross_entropy_backward,
    "weft.ctc_loss": ctc_loss,
    "weft.ctc_loss_backward": ctc_loss_backward,
}
