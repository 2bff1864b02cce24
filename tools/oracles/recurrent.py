"""What a layer of an LSTM means, written for clarity: the oracle of the rule checker."""

from __future__ import annotations

from typing import Any

import torch


def lstm(*call: Any) -> tuple[Any, ...]:
    """`weft.lstm` by `torch.lstm`; zeros are saved for the backward, which needs nothing."""
    *operands, reverse, train = call
    x, hidden = operands[0], operands[2].shape[1]
    saved = torch.zeros(x.shape[1], 5 * x.shape[0] * hidden * x.element_size() * train)
    return (*_layer(_with_biases(operands), reverse), saved.to(torch.uint8))


def lstm_backward(*call: Any) -> tuple[Any, ...]:
    """`weft.lstm_backward` by autograd."""
    gradients, operands, reverse = call[:3], call[3:10], call[-1]
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in _with_biases(operands)]
        pairs = zip(_layer(leaves, reverse), gradients, strict=True)
        known = [(result, gradient) for result, gradient in pairs if gradient is not None]
        made, given = zip(*known, strict=True)
        found: tuple[Any, ...] = torch.autograd.grad(made, leaves, given)
    return found


def _with_biases(operands: Any) -> list[Any]:
    """The operands with zeros for biases that are None."""
    none = operands[2].new_zeros(operands[2].shape[0])
    return [none.clone() if one is None else one for one in operands]


def _layer(operands: list[Any], reverse: bool) -> tuple[Any, Any, Any]:
    x, *weights, state, cell = operands
    x = x.flip(0) if reverse else x
    first = (state[None], cell[None])
    out, last, last_cell = torch.lstm(x, first, weights, True, 1, 0.0, True, False, False)
    return out.flip(0) if reverse else out, last[0], last_cell[0]
