"""The state of a search: what was planned, what is the best of it, and what is left; the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from typing import TypeAlias, TypeGuard, final

import numpy as np

from weft.errors import UserError
from weft.search.bounds.additive import AdditivePart, additive_part
from weft.search.bounds.floors import Floors
from weft.search.budget import Budget
from weft.search.evaluation.evaluator import Evaluator, Whole
from weft.search.evaluation.measures import Answer, Longer, Measures, Refused
from weft.search.order.estimates import Estimates
from weft.search.order.frontier import Frontier
from weft.search.order.in_stages import Lines
from weft.search.outcome.result import (
    PlannedStrategy,
    SearchResult,
    not_searched,
    nothing_fits,
    rows,
)
from weft.search.outcome.why_not import LookedAt, Sources, why_not
from weft.search.record.record import Learned, SearchRecord
from weft.search.space.point import Point
from weft.search.space.points import Points
from weft.strategy.strategy import Strategy, stage_count
from weft.units import Seconds

NO_TIME, NO_MOVES = "not reached in time", "not reached with so many moves"
# What goes on where no moves are tried, and what is known of moves then.
POINTS, NO_MOVE = (
    "points",
    "none was tried from the best: time, or the number of moves, was used up",
)
# Where no point of a space was looked at, such as with stages that are fixed by hand.
NOTHING_KNOWN = Seconds(0.0)
# Summing up layouts takes this part of a plan's seconds, about; less in stages, whose plans take longer.
ADDED_UP, _ADDED_UP_IN_STAGES = 0.5, 0.25
# Those that people write by hand, and all others.
_Fronts: TypeAlias = tuple[Frontier, Frontier]
# So many of the reasons for which moves were refused stand in the result, the most frequent ones.
_REASONS = 3


@final
class SearchState:
    """Plans strategies one after the other, and keeps what comes out.

    Args:
        evaluator: plans and simulates.
        floors: of points.
        budget: what may be spent.
        learned: of an earlier search.
        told: is given the state, at each `tell`.

    Attributes:
        facts: of the step.
        estimates: of points.
        fronts: points that were not planned yet: those that people write by hand, and all others.
        by_hand: all points that people write by hand, planned or not.
        points: the answers of points that were planned.
        until: the part of the seconds at which what goes on now ends.
        locality: knowledge of moves from the best, in words; "" where there is none. It counts until another one is
            the best.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        floors: Floors,
        budget: Budget,
        learned: Learned = Learned(),  # noqa: B008 (frozen)
        told: Told = lambda _: None,
    ) -> None:
        self.evaluator, self.floors, self.budget = evaluator, floors, budget
        self.facts, self.learned = floors.facts, learned
        self._told = told
        evaluator.learn(learned.answers, learned.longer)
        self.estimates = Estimates(floors, Lines(self.facts, evaluator), self.strategy, learned)
        self.fronts: _Fronts = _empty(self.estimates), _empty(self.estimates)
        self.by_hand, self.points = Points.of(()), dict[Point, Answer]()
        self._least: Seconds | None = None
        self._skipped = Counter[str]()
        # The part of the seconds at which what goes on now ends, its name, and what is known of moves from the best.
        self.until, self._chain, self.locality = 1.0, POINTS, ""
        self._begun = 0
        self._refused = Counter[str]()
        self._tried: dict[str, PlannedStrategy] = {}
        # With all that its plan says, where it was made here. One tuple: Ctrl-C may come between two assignments.
        self._best: tuple[Seconds, str, Whole | None] | None = None
        # Strategies that moves led to, and those that an earlier search knew, as text.
        self._moves, self._given = set[str](), set[str]()
        # Of all strategies that were tried, or that moves led to.
        self._keys = set[str]()
        self._additive: dict[str, AdditivePart | None] = {}
        # Seconds of each plan.
        self._took: list[float] = []
        self._course: list[LookedAt] = []
        self._begin = budget.now()

    @property
    def skipped(self) -> Counter[str]:
        """Numbers of points that were not planned, by the reason."""
        return Counter(self._skipped)

    def arrange(self, by_hand: Points, least: Seconds, fronts: _Fronts) -> None:
        """Take the points of a space.

        Args:
            by_hand: those that people write by hand, with room or without.
            least: seconds that any of them takes at least.
            fronts: those that may have room.
        """
        self.by_hand, self._least, self.fronts = by_hand, least, fronts

    def leave_out(self, why: str, count: int = 1) -> None:
        """Count points that are not planned, by the reason."""
        self._skipped[why] += count

    def tell(self) -> None:
        """Tell what is known so far."""
        self._told(self)

    @property
    def planned(self) -> int:
        """The number of strategies that were tried."""
        return len(self._keys)

    @property
    def planned_anew(self) -> int:
        """The number of strategies of which no earlier search knew what they take."""
        return self.planned - len(self._given)

    @property
    def best(self) -> tuple[str, Strategy, Measures] | None:
        """The quickest that fits: its name, itself, and what it takes; None where none was found yet."""
        if self._best is None:
            return None
        name, strategy, found, _ = self._tried[self._best[1]]
        assert isinstance(found, Measures)
        return name, strategy, found

    @property
    def quickest(self) -> Seconds:
        """Seconds that the best takes; endless where none was found yet."""
        return Seconds(inf) if self._best is None else self._best[0]

    def best_staged_otherwise(self) -> tuple[str, Strategy, Measures] | None:
        """The quickest that has room, with stages where the best has none, or without where it has some; else None."""
        assert self.best is not None
        staged = stage_count(self.best[1]) > 1
        others = [
            (name, strategy, found)
            for name, strategy, found, _ in self._tried.values()
            if self.fits(found) and (stage_count(strategy) > 1) != staged
        ]
        return min(others, key=lambda each: each[2].seconds, default=None)

    @property
    def bound(self) -> Seconds:
        """Seconds that any strategy of the space takes at least; 0 where nothing is known."""
        return NOTHING_KNOWN if self._least is None else min(self._least, self.quickest)

    @property
    def took_lately(self) -> float:
        """Seconds of the longest of the last three plans; 0 before any."""
        return max(self._took[-3:], default=0.0)

    def seconds_at_end(self, unknown: float) -> float:
        """Seconds in which the best is planned once more at the end: another process, or an earlier search, did it.

        Args:
            unknown: seconds of such a plan where nothing says them.
        """
        if self.best is None or self._best is None or self._best[2] is not None:
            return 0.0
        return self.evaluator.took(self.best[1]) or unknown

    def plan(self, name: str, strategy: Strategy, by_hand: bool = False) -> Answer:
        """Plan and simulate a strategy, unless that was done."""
        key = str(strategy)
        if key in self._tried:
            return self._tried[key][2]
        known = self.evaluator.knows(strategy)
        found = self.evaluator.of(strategy)
        self._note_time(key, strategy, known)
        self._keys.add(key)
        self._tried[key] = PlannedStrategy(name, strategy, found, by_hand)
        if self.fits(found) and found.seconds < self.quickest:
            self._take(found, key, strategy)
        self._note_course(found)
        return found

    @contextmanager
    def in_chain(self, name: str) -> Iterator[None]:
        """Have the body stand in the course of the search under a name of its own, such as "descent 2"."""
        before, self._begun = self._chain, self._begun + 1
        self._chain = f"{name} {self._begun}"
        try:
            yield
        finally:
            self._chain = before

    def forget_refused(self, start: Strategy) -> None:
        """Take a start that is refused for none: a search has its moves, and plans a strategy, as without it."""
        key = str(start)
        found = self._tried[key][2]
        if isinstance(found, Refused):
            self.leave_out(f"the start is refused: {found.why.splitlines()[0]}")
            del self._tried[key]
            self._keys.discard(key)
            self._given.discard(key)

    def move(self, name: str, strategy: Strategy, most: Seconds) -> Answer | Longer:
        """Plan a strategy that a move led to, and simulate it where it may take at most so many seconds.

        Only those that become the best stand among what was tried.
        """
        key = str(strategy)
        known = self.evaluator.knows(strategy, most)
        found = self.evaluator.within(strategy, most)
        self._note_time(key, strategy, known)
        if isinstance(found, Refused) and key not in self._moves:
            self._refused[f"refused: {found.why}"] += 1
        self._moves.add(key)
        self._keys.add(key)
        if self.fits(found) and found.seconds < self.quickest:
            self._tried.setdefault(key, PlannedStrategy(name, strategy, found, by_hand=False))
            self._take(found, key, strategy)
        self._note_course(found)
        return found

    def _note_course(self, found: Answer | Longer) -> None:
        """Note what came of a strategy, in the course of the search."""
        seconds = found.seconds if self.fits(found) else None
        after, best = Seconds(self.budget.now() - self._begin), self._best and self._best[0]
        self._course.append(LookedAt(after, self._chain, seconds, best, self.bound))

    def _note_time(self, key: str, strategy: Strategy, known: bool) -> None:
        """Note how long a plan took, or that an earlier search made it."""
        if not known:
            self._took.append(self.evaluator.took(strategy))
        elif key not in self._moves and key not in self._tried:
            self._given.add(key)

    def _take(self, found: Measures, key: str, strategy: Strategy) -> None:
        """Take a strategy for the best; of moves from it nothing is known."""
        self.locality = ""
        self._best = found.seconds, key, self.evaluator.last(strategy)

    def fits(self, found: Answer | Longer) -> TypeGuard[Measures]:
        """True where a strategy can be planned, is known whole, and takes no more memory than the limit."""
        limit = self.floors.limit
        return isinstance(found, Measures) and (limit is None or found.memory <= limit)

    def strategy(self, point: Point) -> Strategy:
        """The strategy of a point."""
        facts = self.facts
        return point.strategy(facts.linears, facts.base, facts.blocks, facts.experts)

    def end(self) -> None:
        """Take the budget for used up: what a result says beyond what is known is left out, where it takes long."""
        self.budget = self.budget.used_up()

    def result(self) -> SearchResult:
        """The result of the search.

        Raises:
            UserError: no strategy that was planned fits.
        """
        left = sum(len(front) + front.left_out for front in self.fronts)
        skipped = self._skipped + Counter({NO_TIME if self.budget.ends < inf else NO_MOVES: left})
        if self.best is None:
            raise UserError(nothing_fits(self._tried.values(), self.floors.limit, left))
        _, strategy, best = self.best
        simulation, additive = self._planned_whole().simulation, self.additive()
        tried = rows(self._tried.values(), str(strategy), self.floors.limit)
        return SearchResult(
            strategy,
            simulation,
            self.bound,
            tried,
            {**skipped, **dict(self._refused.most_common(_REASONS))},
            not_searched(self.facts.statistics),
            self.locality or NO_MOVE,
            why_not(self.by_hand, best, self._sources()),
            additive,
            tuple(self._course),
            record=self.record(),
        )

    def _planned_whole(self) -> Whole:
        """All that a plan of the best says; it is made once more where another process, or search, has made it."""
        assert self.best is not None
        assert self._best is not None
        seconds, key, whole = self._best
        if whole is None:
            whole = self.evaluator.whole(self.best[1])
            self._best = seconds, key, whole
        return whole

    def additive(self) -> AdditivePart | None:
        """The additive part of the best; None where it cannot be said, or time does not suffice."""
        assert self.best is not None
        key = str(self.best[1])
        if key not in self._additive:
            part = _ADDED_UP_IN_STAGES if stage_count(self.best[1]) > 1 else ADDED_UP
            soon = part * self.evaluator.took(self.best[1])
            if not self.budget.has(soon):
                return None
            whole = self._planned_whole()
            self._additive[key] = additive_part(self.facts, self.best[1], whole.deduced)
        return self._additive[key]

    def record(self) -> SearchRecord:
        """The best so far, and all that was learned; once something fits."""
        assert self.best is not None
        evaluator, facts, best = self.evaluator, self.facts, self.best[1]
        points = {**self.learned.points, **self.points}
        looks = dict(self.estimates.looks)
        learned = Learned(dict(evaluator.answers), evaluator.longer, points, looks)
        step, machine = facts.step.fingerprint, facts.machine.fingerprint
        return SearchRecord(best, facts.base, step, machine, learned)

    def _sources(self) -> Sources:
        estimates, floors = self.estimates, self.floors

        def estimated(point: Point) -> Measures | None:
            return estimates.refined(point) if estimates.looked_at(point) else None

        looked_at = [flat for flat, look in estimates.looks.items() if look.answer is not None]
        return Sources(
            *(self.points, looked_at, estimated, floors.least, floors.memory, floors.limit)
        )


def _empty(estimates: Estimates) -> Frontier:
    return Frontier(Points.of(()), np.zeros(0), estimates)


# Is given the search so far, after each strategy.
Told: TypeAlias = Callable[[SearchState], None]
