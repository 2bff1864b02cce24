"""Moves, and sequences of them that are made when asked for: steps of many calls have hundreds of thousands."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeAlias, final

from weft.strategy.strategy import Strategy


@final
@dataclass(frozen=True)
class StrategyMove:
    """A small change of a strategy.

    Attributes:
        name: a text for the change.
        on: the strategy with the change; one that has it already stays as it is.
        worth: of a move of placements or runs, the bytes that all ranks together should save.
    """

    name: str
    on: Callable[[Strategy], Strategy]
    worth: float = 0.0


@final
@dataclass(frozen=True)
class LazyMoves:
    """So many moves; `make` makes the one of a number, from 0, on request."""

    count: int
    make: Callable[[int], StrategyMove]

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> StrategyMove:
        return self.make(range(self.count)[number])

    def __iter__(self) -> Iterator[StrategyMove]:
        return map(self.make, range(self.count))


Several: TypeAlias = Sequence[StrategyMove] | LazyMoves


def chain_moves(parts: Iterable[Several]) -> LazyMoves:
    """Sequences of moves, one after the other, as one; none of them is gone through."""
    filled = tuple(part for part in parts if len(part))
    ends = tuple(accumulate(map(len, filled)))

    def made(place: int) -> StrategyMove:
        part = bisect_right(ends, place)
        return filled[part][place - (ends[part - 1] if part else 0)]

    return LazyMoves(ends[-1] if ends else 0, made)
