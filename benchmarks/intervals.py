"""Medians with an interval of confidence that asks nothing of how the values are distributed."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb

# The part of all repetitions whose interval holds the true median, if rounds do not depend on each other.
CONFIDENCE = 0.95


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> list[float] | None:
    """The least and the largest value that the median may have; None where there are too few values to say.

    Of n values as many lie below the true median as heads fall in n throws of a coin: between the k-th
    from below and the k-th from above it lies but for twice the odds of fewer than k heads (David and Nagaraja, Order
    Statistics, section 7.1). Six values are the fewest for 95 %.
    """
    ordered = sorted(values)
    size, odds, outside = len(ordered), 0.0, 0
    while outside < size:
        odds += comb(size, outside) / 2**size
        if 2 * odds > 1 - confidence:
            break
        outside += 1
    return [ordered[outside - 1], ordered[size - outside]] if outside else None
