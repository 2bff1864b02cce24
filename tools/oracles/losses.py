"""What losses of a shard of the classes mean, written for clarity: the oracle of the rule checker."""

from __future__ import annotations

from typing import Any

import torch


def nll_shard(
    scores: Any, target: Any, weight: Any, reduction: int, ignored: int, offset: int
) -> Any:
    """The scores stand among the others, which are zero, as are their weights."""
    whole, weights = _among_all(scores, target, weight, offset)
    op = torch.ops.aten.nll_loss2d_forward if scores.dim() == 4 else torch.ops.aten.nll_loss_forward
    return op.default(whole, target, weights, reduction, ignored)


def nll_gradient_shard(
    gradient: Any, scores: Any, target: Any, weight: Any, reduction: int, ignored: int, *rest: Any
) -> Any:
    """The shard's part of the gradient of all scores; `rest` is the total weight and the offset."""
    total, offset = rest
    whole, weights = _among_all(scores, target, weight, offset)
    aten = torch.ops.aten
    op = aten.nll_loss2d_backward if scores.dim() == 4 else aten.nll_loss_backward
    found = op.default(gradient, whole, target, weights, reduction, ignored, total)
    dim = min(1, scores.dim() - 1)
    return found.narrow(dim, offset, scores.shape[dim])


def class_loss(
    x: Any, lse: Any, target: Any, reduction: int, ignored: int, offset: int
) -> tuple[Any, Any]:
    """The shard's losses of log-probabilities; targets are counted where losses are summed."""
    losses, count = nll_shard(x - lse, target, None, reduction, ignored, offset)
    return losses, count if reduction else torch.zeros_like(count)


def class_loss_gradient(
    gradient: Any, x: Any, lse: Any, target: Any, reduction: int, ignored: int, offset: int
) -> Any:
    """Probabilities, less one at the target, in rows that are not ignored."""
    classes = torch.arange(offset, offset + x.shape[1], device=x.device)
    chosen = (classes == target.unsqueeze(1)).to(x.dtype)
    rows = gradient * (target != ignored).to(x.dtype)
    return rows.unsqueeze(1) * ((x - lse).exp() - chosen)


def _among_all(scores: Any, target: Any, weight: Any, offset: int) -> tuple[Any, Any]:
    dim = min(1, scores.dim() - 1)
    count = max(int(target.max()) + 1, offset + scores.shape[dim])
    shape = [*scores.shape[:dim], count, *scores.shape[dim + 1 :]]
    whole, weights = scores.new_zeros(shape), scores.new_zeros(count)
    whole.narrow(dim, offset, scores.shape[dim]).copy_(scores)
    weights[offset : offset + scores.shape[dim]] = 1 if weight is None else weight
    return whole, weights
