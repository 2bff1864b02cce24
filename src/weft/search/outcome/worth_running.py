"""Of the strategies that a search tried, those that are worth a real run: not all of one outline."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from math import inf
from typing import TypeAlias

from weft.search.outcome.result import Tried
from weft.strategy.stages import stage_count
from weft.strategy.strategy import Strategy

# What decides which costs a step's time hangs on: its stages, micro-batches, their order, and the axes of its grid.
_Outline: TypeAlias = tuple[int, int, str | None, int]
# Of those that split other parameters, the ones run that should take so many times as long as the quickest at most:
# steps of some works took up to a fifth less, or more, than was simulated.
_NEAR = 1.25
# Entries that a step without stages can do without.
_ADDED = ("micro_batches", "schedule", "in_flight", "zero", "recompute", "offload")


def worth_running(
    tried: Sequence[Tried],
    count: int,
    fixed: Strategy | None = None,
    fits: Callable[[Strategy], bool] = lambda _: True,
    split: Callable[[Strategy], Hashable] = lambda _: None,
) -> list[Strategy]:
    """Some strategies that fit, the quickest first.

    A search ends among strategies that differ by little from its best: where the simulation errs about one, it errs
    about all. Half of those returned are the quickest; the other half is the quickest that people write by hand, then
    the quickest without what is added to its layouts, then the quickest that splits other parameters, where it should
    not be far slower, then the quickest of each other number of stages and micro-batches, as far as there are such.

    Of those whose plans are equal one is returned.

    Args:
        tried: strategies that were planned, the quickest that fit first, as a result of a search has them.
        count: how many are returned at most, from 1.
        fixed: entries that hold for every strategy.
        fits: true where a strategy that was not tried can be planned and has room; it is behind the others.
        split: says of a strategy which parameters it splits.
    """
    fit = list(_unlike(each for each in tried if each.outcome in ("best", "slower")))
    half = max(1, count // 2)
    bare = _bare(fit, fixed or Strategy()) if count > 2 else None
    # Patterns count in their order, which equal mappings need not have.
    known = next((each for each in tried if str(each.strategy) == str(bare)), None)
    if bare is not None and known is None and fits(bare):
        return [*_some(fit, half, count - 1, split), bare]
    return _some(fit, half, count, split, known)


def _some(
    fit: Sequence[Tried],
    half: int,
    count: int,
    split: Callable[[Strategy], Hashable],
    bare: Tried | None = None,
) -> list[Strategy]:
    """So many strategies, the quickest first: half of them the quickest, then others, then the next ones.

    Args:
        fit: those that fit, the quickest first.
        half: how many are the quickest.
        count: how many are returned at most.
        split: says of a strategy which parameters it splits.
        bare: the one without what is added to its layouts, where it is among those that were tried.
    """
    taken = list(fit[:half])
    for each in (*_others(fit, taken, split, bare), *fit):
        if len(taken) < count and each not in taken:
            taken.append(each)
    return [each.strategy for each in fit if each in taken]


def _unlike(fit: Iterable[Tried]) -> Iterator[Tried]:
    """One of those of an outline that take the same time and memory to the last digit: their plans are equal."""
    seen = set[object]()
    for each in fit:
        plan = (each.seconds, each.memory, _outline(each.strategy)[:3])
        if plan not in seen:
            seen.add(plan)
            yield each


def _bare(fit: Sequence[Tried], fixed: Strategy) -> Strategy | None:
    """The layouts of the quickest without stages, and no more than them and what is fixed; None where it is so already.

    What a part of a step, a gather or a run again costs beside its calls is what simulations know least of.
    """
    flat = next((each.strategy for each in fit if stage_count(each.strategy) == 1), None)
    if flat is None:
        return None
    found = replace(flat, **{name: getattr(fixed, name) for name in _ADDED})
    return found if found != flat else None


def _others(
    fit: Sequence[Tried],
    taken: Sequence[Tried],
    split: Callable[[Strategy], Hashable],
    bare: Tried | None,
) -> Iterator[Tried]:
    """The quickest by hand, the bare one if it fits, and the quickest of each that those taken are all unlike.

    First of those that split other parameters, as far as these are near; then of each other outline.
    """
    first = [each for each in fit if each.by_hand][:1] + [each for each in fit if each is bare]
    yield from first
    taken = [*taken, *first]
    near = [each for each in fit if (each.seconds or inf) <= _NEAR * (fit[0].seconds or inf)]
    others = list(_unlike_by(near, taken, lambda each: split(each.strategy)))
    yield from others
    yield from _unlike_by(fit, [*taken, *others], lambda each: _outline(each.strategy))


def _unlike_by(
    fit: Iterable[Tried], taken: Iterable[Tried], trait: Callable[[Tried], Hashable]
) -> Iterator[Tried]:
    """The first of each trait that none of those taken has."""
    known = set(map(trait, taken))
    for each in fit:
        if (own := trait(each)) not in known:
            known.add(own)
            yield each


def _outline(strategy: Strategy) -> _Outline:
    axes = sum(size > 1 for size in strategy.grid)
    return stage_count(strategy), strategy.micro_batches, strategy.schedule, axes
