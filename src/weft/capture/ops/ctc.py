"""Connectionist temporal classification: `weft.ctc_loss`, whose saved table is as wide as the longest target may be.

Torch makes it as wide as the longest target is, which only its lengths tell. Targets that stand behind
one another in a vector become rows of a matrix, so that the batch can be split.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_GIVEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
torch.library.define(
    "weft::ctc_loss", f"({_GIVEN}, int blank, bool zero_infinity) -> (Tensor, Tensor)"
)
torch.library.define(
    "weft::ctc_loss_backward",
    f"(Tensor grad, {_GIVEN}, Tensor losses, Tensor log_alpha, int blank, bool zero_infinity) -> Tensor",
)


def _losses(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Results of `weft.ctc_loss`, without values."""
    steps, batch, _classes = log_probs.shape
    width = 2 * targets.shape[1] + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, width)


def _gradient(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    """Results of `weft.ctc_loss_backward`, without values."""
    return log_probs.new_empty(log_probs.shape)


torch.library.register_fake("weft::ctc_loss", _losses)
torch.library.register_fake("weft::ctc_loss_backward", _gradient)


def _rows(
    targets: Tensor, lengths: Tensor, steps: int, check: bool = False
) -> tuple[Tensor, Tensor]:
    """Targets as [n, s], and their lengths.

    Of targets in a vector none needs more places than there are steps, and one: longer ones fit in no
    way, nor does that part of them.
    """
    if targets.dim() == 2:
        return targets, lengths
    count = targets.numel()
    if check:
        text = f"ctc_loss: the lengths of targets of shape [{count}] must add up to {count}"
        torch.ops.aten._assert_async.msg(lengths.sum() == count, text)
    width = min(count, steps + 1)
    if not width:
        return targets.new_zeros(len(lengths), 0), lengths
    first = (lengths.cumsum(0) - lengths).unsqueeze(1)
    places = first + torch.arange(width, device=targets.device)
    return targets[places.clamp(max=count - 1)], lengths.clamp(max=width)


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    inputs, lengths = input_lengths.reshape(-1), target_lengths.reshape(-1)
    rows, lengths = _rows(targets, lengths, len(log_probs), check=True)
    return torch.ops.weft.ctc_loss(log_probs, rows, inputs, lengths, blank, zero_infinity)


def _ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    inputs, lengths = input_lengths.reshape(-1), target_lengths.reshape(-1)
    rows, lengths = _rows(targets, lengths, len(log_probs))
    saved = neg_log_likelihood, log_alpha, blank, zero_infinity
    return torch.ops.weft.ctc_loss_backward(grad, log_probs, rows, inputs, lengths, *saved)


TABLE: dict[str, Callable[..., Any]] = {
    "_ctc_loss.Tensor": _ctc_loss,
    "_ctc_loss_backward.Tensor": _ctc_loss_backward,
}
