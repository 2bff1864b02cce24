"""A clock that runs on when nothing more happens at one time: it knows when the acts that run will end."""

from __future__ import annotations

from heapq import heappop, heappush
from typing import Generic, TypeVar, final

Item = TypeVar("Item")


@final
class VirtualClock(Generic[Item]):
    """Virtual seconds, and what is to happen at which of them.

    Attributes:
        now: seconds since the beginning.
    """

    __slots__ = ("_coming", "_count", "now")

    def __init__(self) -> None:
        self.now = 0.0
        # A heap of (time, number, what); of equal times, what was told first comes first.
        self._coming: list[tuple[float, int, Item]] = []
        self._count = 0

    def __call__(self) -> float:
        """What time it is."""
        return self.now

    def after(self, seconds: float, item: Item) -> float:
        """Note that something happens in so many seconds; returns when that is."""
        self._count += 1
        time = self.now + seconds
        heappush(self._coming, (time, self._count, item))
        return time

    def due(self) -> list[Item]:
        """What happens now, in order; each is told once."""
        found = []
        while self._coming and self._coming[0][0] <= self.now:
            found.append(heappop(self._coming)[2])
        return found

    def advance(self) -> bool:
        """Run on to the next time at which something happens; False if nothing will."""
        if not self._coming:
            return False
        self.now = self._coming[0][0]
        return True
