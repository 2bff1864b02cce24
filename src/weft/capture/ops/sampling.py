"""Samples and permutations, whose numbers depend on others of their row: sorts and sums of `weft.uniform` keys.

Keys are float64, so that two of them hardly ever agree. A row is never cut, because a sort or a
running sum needs all of it; rows are drawn by their global position like everything else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from weft.capture.ops.random import exponential, uniform, without_generator

Tensor = torch.Tensor


def _randperm(
    n: int, *, dtype: torch.dtype | None = None, device: torch.device | None = None, **_: Any
) -> Tensor:
    """The order of random keys."""
    keys = uniform([n], torch.float64, torch.device(device or "cpu"))
    return torch.sort(keys).indices.to(dtype or torch.int64)


def _multinomial(self: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
    """Numbers of classes with weights `self`, shape [classes] or [rows, classes]."""
    weights = self.to(torch.float64)
    draw = _independent if replacement else _race
    return draw(weights, num_samples)


def _independent(weights: Tensor, count: int) -> Tensor:
    """The first class whose running sum of weights exceeds a uniform number."""
    sums = torch.cumsum(weights, -1)
    drawn = uniform([*weights.shape[:-1], count], torch.float64, weights.device)
    return torch.searchsorted(sums, drawn * sums[..., -1:], right=True)


def _race(weights: Tensor, count: int) -> Tensor:
    """The first `count` to arrive when class `i` takes an exponential time of rate `weights[i]`.

    Efraimidis and Spirakis: Weighted random sampling with a reservoir (2006).
    """
    times = exponential(weights.shape, torch.float64, weights.device)
    return torch.topk(weights / times, count).indices


def _poisson(self: Tensor, _: None = None) -> Tensor:
    """One less than the least k for which fewer than k events have a probability above a uniform number."""
    rate = self.to(torch.float64)
    drawn = uniform(self.shape, torch.float64, self.device)
    # Beyond 40 standard deviations lies less than a number of 53 bits can tell.
    low, high = torch.zeros_like(rate), torch.ceil(rate + 40 * torch.sqrt(rate) + 40)
    for _halving in range(_HALVINGS):
        middle = torch.ceil((low + high) / 2)
        enough = torch.special.gammaincc(middle, rate) > drawn
        high = torch.where(enough, middle, high)
        low = torch.where(enough, low, middle)
    return (high - 1).to(self.dtype)


_HALVINGS = 32  # enough for rates up to 4e9


_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "randperm.default": _randperm,
    "randperm.generator": _randperm,
    "multinomial.default": _multinomial,
    "poisson.default": _poisson,
}
TABLE = {name: without_generator(function) for name, function in _FUNCTIONS.items()}
