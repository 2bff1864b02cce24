"""Losses as one op: the backward of a cross-entropy (on shards of the classes in `class_ops`), and CTC."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.runtime.class_ops import rows_at_a_time

_LOSS = torch.ops.aten.nll_loss_backward.default
_CTC = torch.ops.aten._ctc_loss.Tensor
_CTC_BACKWARD = torch.ops.aten._ctc_loss_backward.Tensor
_SOFTMAX = torch.ops.aten._log_softmax_backward_data.out


def cross_entropy_backward(
    grad: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
    total: Tensor,
) -> Tensor:
    """`weft.cross_entropy_backward`: the gradient of the logits, by torch's kernels on a few rows at a time.

    Args:
        grad: of the losses, [n], or of their sum, a number.
        scores: log-probabilities, [n, classes].
        target: class numbers, int64 [n].
        weight: of the classes, [classes], or None.
        reduction: torch's number of "none" or "sum".
        ignored: class number that counts for nothing.
        total: weight of all targets, a number.

    Returns:
        Shape [n, classes].
    """
    found = torch.empty_like(scores)
    for rows in rows_at_a_time(scores):
        some, of_rows = scores[rows], grad[rows] if grad.dim() else grad
        # Dense, but of a few rows: it stays in the cache.
        dense = _LOSS(of_rows, some, target[rows], weight, reduction, ignored, total)
        _SOFTMAX(dense, some, 1, scores.dtype, out=found[rows])
        del dense  # before the next one is made
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
        blank: number of the blank class.
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


LOSS_OPS: dict[str, Callable[..., Any]] = {
    "weft.cross_entropy_backward": cross_entropy_backward,
    "weft.ctc_loss": ctc_loss,
    "weft.ctc_loss_backward": ctc_loss_backward,
}
