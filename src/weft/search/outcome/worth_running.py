"""Of the strategies that a search tried, those that are worth a real run: not all of one kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

from weft.search.outcome.result import Tried
from weft.strategy.strategy import Strategy

# What decides which costs a step's time hangs on: its stages, micro-batches, their order, and the axes of its grid.
_Kind: TypeAlias = tuple[int, int, str | None, int]


def worth_running(tried: Sequence[Tried], count: int) -> list[Strategy]:
    """Some strategies that fit, the quickest first.

    A search ends among strategies that differ by little from its best: where the simulation errs about one, it errs
    about all. Half of those returned are the quickest; the other half is the quickest that people write by hand, then
    the quickest of each other number of stages and micro-batches, as far as there are such.

    Args:
        tried: strategies that were planned, the quickest that fit first, as a result of a search has them.
        count: how many are returned at most, from 1.
    """
    fit = [each for each in tried if each.outcome in ("best", "slower")]
    taken = fit[: (count + 1) // 2]
    for each in (*_others(fit, taken), *fit):
        if len(taken) < count and each not in taken:
            taken.append(each)
    return [each.strategy for each in fit if each in taken]


def _others(fit: Sequence[Tried], taken: Sequence[Tried]) -> Iterator[Tried]:
    """The quickest by hand, and the quickest of each kind that is not among those taken."""
    by_hand = [each for each in fit if each.by_hand][:1]
    kinds = {_kind(each.strategy) for each in (*taken, *by_hand)}
    yield from by_hand
    for each in fit:
        if (kind := _kind(each.strategy)) not in kinds:
            kinds.add(kind)
            yield each


def _kind(strategy: Strategy) -> _Kind:
    stages = strategy.stages if isinstance(strategy.stages, int) else len(strategy.stages)
    axes = sum(size > 1 for size in strategy.grid)
    return stages, strategy.micro_batches, strategy.schedule, axes
