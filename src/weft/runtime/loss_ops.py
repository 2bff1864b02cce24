"""The backward of a cross-entropy as one op; on shards of the classes it is one of `class_ops`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.runtime.class_ops import rows_at_a_time


def cross_entropy_backward(
    grad: Tensor,
    scores: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignored: int,
) -> Tensor:
    """`weft.cross_entropy_backward`: the gradient of the logits.

    Args:
        grad: of the losses, [n], or of their sum, a number.
        scores: log-probabilities, [n, classes].
        target: class numbers, int64 [n].
        weight: of the classes, [classes], or None.
        reduction: torch's number of "none" or "sum", which the shape of `grad` tells too.
        ignored: class number that counts for nothing.

    Returns:
        Shape [n, classes]: probabilities, less one at the target, times each row's gradient.
    """
    out = target == ignored
    place = target.masked_fill(out, 0)
    each = grad if weight is None else grad * weight[place]
    rows_of = torch.where(out, 0, each).to(scores.dtype).unsqueeze(1)
    found = torch.empty_like(scores)
    for rows in rows_at_a_time(scores):
        torch.exp(scores[rows], out=found[rows]).mul_(rows_of[rows])
    return found.scatter_add_(1, place.unsqueeze(1), -rows_of)


LOSS_OPS: dict[str, Callable[..., Any]] = {"weft.cross_entropy_backward": cross_entropy_backward}
