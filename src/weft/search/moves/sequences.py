"""Sequences of moves that are made when they are asked for: steps of many calls have hundreds of thousands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import final, overload

from weft.strategy.strategy import Strategy


@final
@dataclass(frozen=True)
class StrategyMove:
    """A small change of a strategy.

    Attributes:
        name: what differs then, in words.
        on: the strategy with the change; one that has it already stays as it is.
    """

    name: str
    on: Callable[[Strategy], Strategy]


@final
class MadeLater(Sequence[StrategyMove]):
    """So many moves, of which each is made when it is asked for.

    Args:
        count: of them.
        make: the move of a number, from 0.
    """

    def __init__(self, count: int, make: Callable[[int], StrategyMove]) -> None:
        self._count, self._make = count, make

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, number: int) -> StrategyMove: ...

    @overload
    def __getitem__(self, number: slice) -> Sequence[StrategyMove]: ...

    def __getitem__(self, number: int | slice) -> StrategyMove | Sequence[StrategyMove]:
        if isinstance(number, slice):
            return [self._make(each) for each in range(self._count)[number]]
        return self._make(range(self._count)[number])


def chained(parts: Iterable[Sequence[StrategyMove]]) -> Sequence[StrategyMove]:
    """Sequences of moves, one after the other, as one; none of them is gone through."""
    filled = tuple(part for part in parts if len(part))
    ends = tuple(accumulate(map(len, filled)))

    def made(place: int) -> StrategyMove:
        part = bisect_right(ends, place)
        return filled[part][place - (ends[part - 1] if part else 0)]

    return MadeLater(ends[-1] if ends else 0, made)
