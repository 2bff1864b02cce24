"""What causal attention of a part of the queries means, written for clarity: the oracle of the rule checker."""

from __future__ import annotations

from typing import Any

import torch


def attention_rows(
    query: Any, key: Any, value: Any, offset: int, scale: float | None = None
) -> tuple[Any, Any]:
    """`weft.attention_rows`: all scores, a mask by positions, a softmax."""
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * (scale or query.shape[3] ** -0.5)
    positions = torch.arange(offset, offset + query.shape[2]).unsqueeze(1)
    scores = scores.masked_fill(torch.arange(key.shape[2]) > positions, -torch.inf)
    return scores.softmax(3) @ value, scores.logsumexp(3)


def attention_rows_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    logsumexp: Any,
    offset: int,
    scale: Any = None,
) -> tuple[Any, ...]:
    """`weft.attention_rows_backward` by autograd."""
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in (query, key, value)]
        found, _ = attention_rows(leaves[0], leaves[1], leaves[2], offset, scale)
        gradients: tuple[Any, ...] = torch.autograd.grad(found, leaves, grad)
    return gradients
