"""Seconds of something that runs again and again: the median of rounds, and how far they lie apart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import NamedTuple, final

import torch

from weft.units import Bytes, Seconds

# Rounds that are measured.
FEWEST, _MOST = 5, 41
# Bytes of which no cache holds much; a step that holds more is as cold.
COLD = Bytes(2**26)
# Nothing takes less than no time: wider, a normal distribution would say so.
_WIDEST = 0.5


@final
class Timing(NamedTuple):
    """Measured seconds.

    Attributes:
        spread: relative standard deviation of a normal distribution with the same quartiles; at most a half.
    """

    seconds: Seconds
    spread: float


def time_in_turns(
    works: Sequence[Callable[[], object]],
    order: Sequence[int],
    patience: float,
    finish: Callable[[], object],
) -> tuple[list[Timing], Timing]:
    """Seconds of several works that run one after the other, again and again, and of a whole round.

    Each finds caches as the others leave them.

    Args:
        order: which of them are called in a round, one after the other; each at least once.
        finish: waits until a device has done what it was given; within the time of each work.
    """
    rounds: list[list[float]] = [[] for _ in works]
    wholes: list[float] = []
    ends = perf_counter() + patience * len(works)
    for number in range(_MOST):
        if number >= FEWEST and perf_counter() > ends:
            break
        whole = 0.0
        for place in order:
            work = works[place]
            start = perf_counter()
            work()
            finish()
            took = perf_counter() - start
            rounds[place].append(took)
            whole += took
        wholes.append(whole)
    return [summary(own) for own in rounds], summary(wholes)


def finish(device: torch.device) -> Callable[[], object]:
    """Waits for a device; the host has done what it does."""
    # A host is done when a call returns.
    return partial(torch.cuda.synchronize, device) if device.type == "cuda" else lambda: None


def summary(rounds: list[float]) -> Timing:
    """The median and the spread of some measurements of one thing."""
    middle = statistics.median(rounds)
    low, _, high = statistics.quantiles(rounds, n=4) if len(rounds) > 1 else (middle,) * 3
    spread = (high - low) / 1.349 / middle if middle else 0.0
    return Timing(Seconds(middle), min(spread, _WIDEST))
