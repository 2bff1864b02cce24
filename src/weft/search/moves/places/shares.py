"""Moves of the ranks of stages: some go to the next stage, a stage on some of another's gets more, two become one."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import permutations

from weft.layout import Placement
from weft.search.moves.places.placements import with_stages
from weft.search.moves.places.rows import joined_rows, row_count, some_rows
from weft.search.moves.strategy_move import StrategyMove
from weft.strategy.parts import Stage
from weft.strategy.strategy import Strategy

Stages = tuple[Stage, ...]


def share_moves(strategy: Strategy) -> Iterator[StrategyMove]:
    """Ranks given to another stage, and stages joined.

    Args:
        strategy: whose stages name modules; others have no such moves.
    """
    if isinstance(strategy.stages, int) or len(strategy.stages) < 2:
        return
    stages = tuple(strategy.stages)
    found = [*_joined(stages), *_given(stages), *_resized(stages)]
    for name, changed in found:
        yield StrategyMove(name, partial(with_stages, changed, strategy.micro_batches))


def _joined(stages: Stages) -> Iterator[tuple[str, Stages]]:
    """A stage and the next one as one, on the ranks of both."""
    for number in range(len(stages) - 1):
        one, two = stages[number : number + 2]
        placement = joined_rows(one.placement, two.placement)
        if placement is not None:
            both = Stage((*one.patterns, *two.patterns), placement)
            yield (
                f"stages {number} and {number + 1} as one",
                (
                    *stages[:number],
                    both,
                    *stages[number + 2 :],
                ),
            )


def _given(stages: Stages) -> Iterator[tuple[str, Stages]]:
    """One rank, or half of them, of a stage to the one before or behind it."""
    for number in range(len(stages) - 1):
        for giver, taker in ((number, number + 1), (number + 1, number)):
            given, taken = stages[giver].placement, stages[taker].placement
            count = row_count(given)
            if not set(given.ranks).isdisjoint(taken.ranks):
                continue
            for size in sorted({1, count // 2} - {0, count}):
                ends = range(count - size, count) if giver < taker else range(size)
                left = [row for row in range(count) if row not in ends]
                more = joined_rows(taken, some_rows(given, ends))
                if more is not None:
                    changed = {giver: some_rows(given, left), taker: more}
                    yield f"{size} rows of stage {giver} to stage {taker}", _on(stages, changed)


def _resized(stages: Stages) -> Iterator[tuple[str, Stages]]:
    """Twice or half as many ranks for a stage on some of another's."""
    for (number, inner), (_, outer) in permutations(enumerate(stages), 2):
        own, every = inner.placement, outer.placement
        if own.axes != every.axes or not set(own.ranks) < set(every.ranks):
            continue
        count, most = row_count(own), row_count(every)
        for size in (count // 2, 2 * count):
            if 0 < size <= most:
                rows = range(0, most, most // size)[:size] if _apart(own) else range(size)
                changed = some_rows(every, rows)
                yield f"stage {number} on {size} rows", _on(stages, {number: changed})


def _apart(placement: Placement) -> bool:
    """True where ranks are no neighbours."""
    ranks = sorted(placement.ranks)
    return ranks[-1] - ranks[0] >= len(ranks)


def _on(stages: Stages, placements: dict[int, Placement]) -> Stages:
    return tuple(
        Stage(stage.patterns, placements.get(number, stage.placement))
        for number, stage in enumerate(stages)
    )
