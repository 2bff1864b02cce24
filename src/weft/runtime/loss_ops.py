"""The backward of a cross-entropy as one op; on shards of the classes it is one of `class_ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.runtime.class_ops import rows_at_a_time

_LOSS = torch.ops.aten.nll_loss_backward.default
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


LOSS_OPS: dict[str, Callable[..., Any]] = {"weft.cross_entropy_backward": cross_entropy_backward}
