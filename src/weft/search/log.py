"""The log of a search: what was planned, in its order, and the best of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TypeGuard, final

from weft.search.budget import Budget
from weft.search.evaluation.evaluator import Evaluator, Whole
from weft.search.evaluation.measures import Answer, Longer, Measures, Refused, key_of
from weft.search.outcome.result import PlannedStrategy
from weft.search.outcome.why_not import Probed
from weft.strategy.strategy import Strategy, stage_count
from weft.units import Seconds

# What goes on where no moves are tried.
POINTS = "points"


@final
@dataclass(frozen=True)
class Best:
    """The quickest strategy that fits.

    Attributes:
        name: in words.
        strategy: as it was planned.
        measures: what it takes.
        whole: all that its plan says; None where another process, or an earlier search, has planned it.
    """

    name: str
    strategy: Strategy
    measures: Measures
    whole: Whole | None = None


@final
class SearchLog:
    """Plans strategies, each once, and keeps what comes out.

    Args:
        evaluator: plans and simulates.
        limit: bytes of memory; None where it is not known.

    Attributes:
        tried: what was planned, by the key of each strategy, but for moves that did not become the best.
        best: of it; None where nothing fits.
        least: seconds that any strategy of the space takes at least; 0 where that is not known.
        course: all that was looked at, in its order.
        refused: how many moves were refused, by the reason.
        locality: knowledge of moves from the best, in words; "" where there is none. It counts until another one is
            the best.
    """

    def __init__(self, evaluator: Evaluator, limit: int | None) -> None:
        self._evaluator, self._limit, self._begin = evaluator, limit, Budget.now()
        self.tried: dict[str, PlannedStrategy] = {}
        self.best: Best | None = None
        self.least, self.locality = Seconds(0.0), ""
        self.course: list[Probed] = []
        self.refused = Counter[str]()
        # All that were planned, with true for what an earlier search knew; seconds of each plan.
        self._known: dict[str, bool] = {}
        self._took: list[float] = []
        self._chain, self._begun = POINTS, 0

    @property
    def planned(self) -> int:
        """The number of strategies that were tried."""
        return len(self._known)

    @property
    def planned_anew(self) -> int:
        """The number of strategies of which no earlier search knew what they take."""
        return len(self._known) - sum(self._known.values())

    @property
    def quickest(self) -> Seconds:
        """Seconds that the best takes; endless where none was found yet."""
        return Seconds(inf) if self.best is None else self.best.measures.seconds

    @property
    def bound(self) -> Seconds:
        """Seconds that any strategy of the space takes at least; 0 where nothing is known."""
        return min(self.least, self.quickest)

    @property
    def took_lately(self) -> float:
        """Seconds of the longest of the last three plans; 0 before any."""
        return max(self._took[-3:], default=0.0)

    def fits(self, found: Answer | Longer) -> TypeGuard[Measures]:
        """True where a strategy can be planned, is known whole, and takes no more memory than the limit."""
        return isinstance(found, Measures) and (self._limit is None or found.memory <= self._limit)

    def plan(self, name: str, strategy: Strategy, by_hand: bool = False) -> Answer:
        """Plan and simulate a strategy, unless that was done."""
        key = key_of(strategy)
        if key not in self.tried:
            known = self._evaluator.knows(strategy)
            found = self._evaluator.of(strategy)
            self.tried[key] = PlannedStrategy(name, strategy, found, by_hand)
            self._note(key, name, strategy, found, known)
        return self.tried[key].answer

    def move(self, name: str, strategy: Strategy, most: Seconds) -> Answer | Longer:
        """Plan a strategy that a move led to, and simulate it where it may take at most so many seconds.

        Only those that become the best stand among what was tried.
        """
        key = key_of(strategy)
        known = self._evaluator.knows(strategy, most)
        found = self._evaluator.within(strategy, most)
        if isinstance(found, Refused) and key not in self._known:
            self.refused[f"refused: {found.why}"] += 1
        self._note(key, name, strategy, found, known)
        return found

    def _note(
        self, key: str, name: str, strategy: Strategy, found: Answer | Longer, known: bool
    ) -> None:
        self._known.setdefault(key, known)
        if not known:
            self._took.append(self._evaluator.took(strategy))
        seconds = found.seconds if self.fits(found) else None
        if self.fits(found) and found.seconds < self.quickest:
            self.tried.setdefault(key, PlannedStrategy(name, strategy, found, by_hand=False))
            self.best = Best(name, strategy, found, self._evaluator.last(strategy))
            self.locality = ""
        after, best = Seconds(Budget.now() - self._begin), self.best
        quickest = None if best is None else best.measures.seconds
        self.course.append(Probed(after, self._chain, seconds, quickest, self.bound))

    def forget_refused(self, start: Strategy) -> str:
        """Take a start that is refused for none, as without it; why it is, "" for one that is not."""
        key = key_of(start)
        found = self.tried[key].answer
        if not isinstance(found, Refused):
            return ""
        del self.tried[key], self._known[key]
        return found.why.splitlines()[0]

    def best_staged_otherwise(self, best: Best) -> Best | None:
        """The quickest that has room, with stages where the best has none, or without where it has some; else None."""
        staged = stage_count(best.strategy) > 1
        others = [
            Best(name, strategy, found)
            for name, strategy, found, _ in self.tried.values()
            if self.fits(found) and (stage_count(strategy) > 1) != staged
        ]
        return min(others, key=lambda each: each.measures.seconds, default=None)

    @contextmanager
    def in_chain(self, name: str) -> Iterator[None]:
        """Have the body stand in the course of the search under a name of its own, such as "descent 2"."""
        before, self._begun = self._chain, self._begun + 1
        self._chain = f"{name} {self._begun}"
        try:
            yield
        finally:
            self._chain = before
