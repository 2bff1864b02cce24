"""The state of a search: what was planned, what is the best of it, and what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from math import inf, log
from time import monotonic
from typing import final

import numpy as np

from weft.errors import UserError
from weft.search.bounds.additive import AdditivePart, additive_part
from weft.search.bounds.floors import Floors
from weft.search.budget import Budget
from weft.search.evaluation.evaluator import Evaluator, Whole
from weft.search.evaluation.measures import Longer, Measures, Refused, key_of
from weft.search.order.estimates import Estimates
from weft.search.order.frontier import Frontier
from weft.search.order.lines import Lines
from weft.search.outcome.course import LookedAt
from weft.search.outcome.outcomes import Planned, not_searched, nothing_fits, rows
from weft.search.outcome.result import SearchResult
from weft.search.outcome.why_not import Sources, kinds_of, why_not
from weft.search.outcome.worth_running import stage_count
from weft.search.record.learned import Learned
from weft.search.record.record import SearchRecord
from weft.search.space.fixed import fits
from weft.search.space.point import Point
from weft.search.space.points import Mask, Points
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

SLOWER = "no quicker than the best, whatever their plans"
NO_ROOM = "take more memory than there is, whatever their plans"
NO_TIME, NO_MOVES = "not reached in time", "not reached with so many moves"
SLOWER_BEFORE = "far slower in the search that this one starts from, with something else fixed"
# A point that should take so many times as long as the best waits until moves from that were tried: by small steps, and
# by floors.
_UNLIKELY, _UNLIKELY_ROUGH = 1.02, 2.0
# So many times as long as the best: far slower; and slower.
_FAR, _SLOWER = 1.1, 1.01
# Layouts are summed up in this part of the time of a plan, about.
_ADDED_UP = 0.5
# The part of the time that is left which the cheapest layouts of data parallel may take.
_CHEAPEST = 0.4
# Reasons that are told for which moves were refused.
_REASONS = 3
# Seconds that differ by less than so many times are about the same.
_ABOUT = 1.25


@final
class Enumeration:
    """Plans strategies one after the other, and keeps what comes out.

    Args:
        evaluator: plans and simulates.
        floors: of points.
        budget: what may be spent.
        learned: of an earlier search.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        floors: Floors,
        budget: Budget,
        learned: Learned = Learned(),  # noqa: B008 (frozen)
    ) -> None:
        self.evaluator, self.floors, self.budget = evaluator, floors, budget
        self.facts = floors.facts
        self.skipped = Counter[str]()
        self._refused = Counter[str]()
        self._tried: dict[str, Planned] = {}
        # With all that its plan says, where it was made here. One tuple: Ctrl-C may come between two assignments.
        self._best: tuple[Seconds, str, Whole | None] | None = None
        self._least = Seconds(float("inf"))
        self._moves = set[str]()
        self._given = set[str]()
        self.locality = ""
        self._additive: dict[str, AdditivePart | None] = {}
        self._took: list[float] = []
        self._begin = monotonic()
        self._course: list[LookedAt] = []
        self.chain = "points"
        self.until = 1.0
        self.learned = learned
        evaluator.learn(learned.answers, learned.longer)
        self.estimates = Estimates(floors, Lines(self.facts, evaluator), self.strategy, learned)
        self._fronts = [Frontier(Points.of(()), np.zeros(0), self.estimates) for _ in range(2)]
        self._by_hand = Points.of(())
        self._points: dict[Point, Measures | Refused] = {}

    @property
    def planned(self) -> int:
        """The number of strategies that were tried."""
        return len(self._tried) + len(self._moves - self._tried.keys())

    @property
    def planned_anew(self) -> int:
        """The number of strategies of which no earlier search knew what they take."""
        return self.planned - len(self._given)

    @property
    def best(self) -> tuple[str, Strategy, Measures] | None:
        """The name of the quickest that fits, and what it takes; None so far."""
        if self._best is None:
            return None
        name, strategy, found, _ = self._tried[self._best[1]]
        assert isinstance(found, Measures)
        return name, strategy, found

    def of_other_kind(self) -> tuple[str, Strategy, Measures] | None:
        """The quickest that has room, with stages where the best has none, or without where it has some; else None."""
        assert self.best is not None
        staged = stage_count(self.best[1]) > 1
        others = [
            (name, strategy, found)
            for name, strategy, found, _ in self._tried.values()
            if isinstance(found, Measures)
            and self._has_room(found.memory)
            and (stage_count(strategy) > 1) != staged
        ]
        return min(others, key=lambda each: each[2].seconds, default=None)

    @contextmanager
    def until_half(self) -> Iterator[None]:
        """Let the body have half of the seconds that are left until `until`."""
        before = self.until
        self.until = (self.budget.part() + before) / 2
        try:
            yield
        finally:
            self.until = before

    @property
    def bound(self) -> Seconds:
        """Seconds that any strategy of the space takes at least."""
        return min(self._least, self._best[0]) if self._best else self._least

    def affords(self) -> bool:
        """True where one more strategy may be planned: it takes as long as the longest of the last, perhaps.

        The best is planned once more at the end where another process, or an earlier search, has planned it.
        """
        soon = max(self._took[-3:], default=0.0)
        if self.best is not None and self._best is not None and self._best[2] is None:
            soon += self.evaluator.took(self.best[1]) or soon
        return self.budget.allows(self.planned_anew, soon) and self.budget.part() < self.until

    def plan(self, name: str, strategy: Strategy, by_hand: bool = False) -> Measures | Refused:
        """Plan and simulate a strategy, unless that was done."""
        key = str(strategy)
        if key in self._tried:
            return self._tried[key][2]
        known = self.evaluator.knows(strategy)
        found = self.evaluator.of(strategy)
        self._note(key, strategy, known)
        self._tried[key] = name, strategy, found, by_hand
        if isinstance(found, Measures) and self._has_room(found.memory) and self._beats(found):
            self._take(found, key, strategy)
        self._noted(found)
        return found

    def move(self, name: str, strategy: Strategy, most: Seconds) -> Measures | Refused | Longer:
        """Plan a strategy that a move led to, and simulate it where it may take at most so many seconds.

        Only those that become the best stand among what was tried.
        """
        key = str(strategy)
        known = self.evaluator.knows(strategy, most)
        found = self.evaluator.within(strategy, most)
        self._note(key, strategy, known)
        if isinstance(found, Refused) and key not in self._moves:
            self._refused[f"refused: {found.why}"] += 1
        self._moves.add(key)
        if isinstance(found, Measures) and self._has_room(found.memory) and self._beats(found):
            self._tried.setdefault(key, (name, strategy, found, False))
            self._take(found, key, strategy)
        self._noted(found)
        return found

    def _noted(self, found: Measures | Refused | Longer) -> None:
        """Note what came of a strategy, in the course of the search."""
        fits = isinstance(found, Measures) and self._has_room(found.memory)
        seconds = found.seconds if fits and isinstance(found, Measures) else None
        after, best = Seconds(monotonic() - self._begin), self._best and self._best[0]
        self._course.append(LookedAt(after, self.chain, seconds, best, self.bound))

    def _note(self, key: str, strategy: Strategy, known: bool) -> None:
        """Note how long a plan took, or that an earlier search made it."""
        if not known:
            self._took.append(self.evaluator.took(strategy))
        elif key not in self._moves and key not in self._tried:
            self._given.add(key)

    def _take(self, found: Measures, key: str, strategy: Strategy) -> None:
        """Take a strategy for the best."""
        self._best = found.seconds, key, self.evaluator.last(strategy)

    def _beats(self, found: Measures) -> bool:
        return self._best is None or found.seconds < self._best[0]

    def _has_room(self, memory: Bytes) -> bool:
        return self.floors.limit is None or memory <= self.floors.limit

    def arrange(self, points: Points) -> None:
        """Take the points that may have room: those that people write by hand, and all others."""
        self._by_hand = points.where(points.by_hand)
        room = self._rooms(points)
        self.skipped[NO_ROOM] += int((~room).sum())
        points = points.where(room)
        least = self.floors.least(points)
        self._least = Seconds(min(self._least, float(least.min(initial=inf))))
        self._fronts = [
            Frontier(points.where(mask), least[mask], self.estimates)
            for mask in (points.by_hand, ~points.by_hand)
        ]

    def _rooms(self, points: Points) -> Mask:
        limit = self.floors.limit
        return self.floors.memory(points) <= (inf if limit is None else limit)

    def plan_points(self, by_hand: bool, told: Callable[[Enumeration], None], likely: bool) -> None:
        """Plan points, the quickest by estimate first, while the budget lasts.

        Args:
            by_hand: those that people write by hand, or the others.
            told: is told what is known, after each.
            likely: only those that should be quicker than the best, where estimates are good.
        """
        front = self._fronts[not by_hand]
        while self._has_left(front) and (self.affords() or not self.planned):
            if likely and (
                self._is_unlikely(front.next_seconds) or self._waits(front, front.next_seconds)
            ):
                return
            point = self._next(front, likely)
            if point is None:
                return
            if self.planned and not self._in_time(point):
                self.skipped[NO_TIME] += 1
            elif self._was_slower(point):
                self.skipped[SLOWER_BEFORE] += 1
            else:
                self._plan_point(front, point, told)

    def _has_left(self, front: Frontier) -> bool:
        """True where some point may still be quicker than the best; others are counted."""
        if self._best is not None:
            self.skipped[SLOWER] += front.drop(self._best[0])
        return len(front) > 0

    def _next(self, front: Frontier, likely: bool) -> Point | None:
        """The next point; None where there is no time to look for it, but one is planned in any case.

        None, too, if `likely` and others are the better beginning.
        """
        point = front.pop(self._may_look, self._in_time, self.affords)
        if point is None:
            if self.planned:
                return None
            point = self._first(front)
        seconds = self.estimates.seconds(point)
        if likely and self._waits(front, seconds, self.estimates.may_have_room(point)):
            front.put_back(point, seconds)
            return None
        return self._with_room(front, point)

    def _waits(self, front: Frontier, seconds: float, room: bool = False) -> bool:
        """True where nothing fits so far, and others are the better beginning.

        They may have room, and these not; or these are far slower only since the quickest of them have none. Without
        time to look at some of these, slower is enough.

        Args:
            front: of these points.
            seconds: that the next of them takes, about.
            room: true where it should have room; others of them may, too.
        """
        other = self._fronts[front is self._fronts[0]]
        if self._best is not None or not other.has_room():
            return False
        slower = _FAR if self._may_look() else _SLOWER
        free = slower * self.estimates.with_room_for_all(front.points)
        return not (room or front.has_room()) or max(free, other.next_seconds) < seconds

    def _first(self, front: Frontier) -> Point:
        """The next point, before all others were looked at; while time lasts one that has room by small steps."""
        point = front.first()
        while self.facts.small is not None and self.budget.allows(0):
            if self.estimates.refined(point) is None or self.estimates.has_room(point):
                break
            front.put_back(point, self.estimates.seconds(point))
            if not front.has_room():
                return front.first()
            point = front.first()
        return point

    def _with_room(self, front: Frontier, point: Point) -> Point:
        """The point, or the one with fewer blocks recomputed where these suffice; the other goes back behind it."""
        fewer = self.estimates.just_enough(point)
        if fewer is None or fewer in self._points:
            return point
        front.put_back(point, self.estimates.seconds_as_it_stands(point))
        return fewer

    def look_at_kinds(self, told: Callable[[Enumeration], None]) -> None:
        """Look at the best, by rough estimate, of each kind of strategy that people write by hand.

        By small steps where there are any, else by a plan of the whole.
        """
        front = self._fronts[0]
        plan = took = 0.0
        for point in self._quick_and_cheap(front.points):
            # Time for a plan of the best is not spent on looks.
            if not self.affords() or (plan and not self.budget.allows(0, plan + took)):
                return
            begin = monotonic()
            if self.estimates.refined(point) is None and self.facts.small is None:
                self._plan_point(front, point, told)
            elif self.estimates.has_room(point):
                seconds = self.estimates.seconds_of_plan(point)
                plan = min(plan, seconds) if plan else seconds
            took = monotonic() - begin

    def plan_cheapest(self, told: Callable[[Enumeration], None]) -> None:
        """Plan the layouts that sum to the least on all ranks, with nothing else: no point says them.

        Where a pipeline is the best, its stages have few layouts, and moves from it lead there by many steps only.
        """
        ranks, left = len(self.evaluator.ranks), self.planned + sum(map(len, self._fronts))
        point = Point(ranks)
        if ranks == 1 or not left or not self._splits(point):
            return
        strategy = self.strategy(point)
        # What an earlier search has planned led it on from there.
        if key_of(strategy) in self.learned.answers or not self._is_quickly_planned(point):
            return
        if self.affords():
            self._plan_point(self._fronts[0], point, told)
        if not isinstance(self._points.get(point), Measures) or not self.affords():
            return
        whole = self.evaluator.last(strategy) or self.evaluator.whole(strategy)
        added = additive_part(self.facts, strategy, whole.deduced)
        if added is not None:
            # Deduction may give the same signatures, and moves are free then to change what parameters hang on.
            bare = replace(added.cheapest, signatures=self.facts.base.signatures)
            self.plan(f"{point}; cheapest layouts", bare)
            self.plan(f"{point}; cheapest layouts, signatures fixed", added.cheapest)
            told(self)

    def _is_quickly_planned(self, point: Point) -> bool:
        """True where plans of its layouts take a small part of the time, and a step of many blocks may have room."""
        if self.facts.small is not None and self.budget.moves == inf:
            room = bool(self._rooms(Points.one(point))[0])
            if not room or not self._may_look() or self.estimates.refined(point) is None:
                return False
        soon = (2 + _ADDED_UP) * self.estimates.seconds_of_plan(point)
        return self.budget.allows(0, soon / _CHEAPEST)

    def _splits(self, point: Point) -> bool:
        """True where each rank of a point has a sample, and what is fixed allows it."""
        return self.facts.samples >= point.data and fits(point, self.facts.base)

    def _quick_and_cheap(self, points: Points) -> Iterator[Point]:
        """Of each kind the quickest; of points about as quick, one of few micro-batches: it is planned quickly."""
        kinds, rough = kinds_of(points), np.maximum(self.estimates.rough(points), 1e-12)
        about = np.trunc(np.log(rough) / log(_ABOUT)).astype(np.int64)
        order = np.lexsort((points.micro_batches, about))
        for kind in dict.fromkeys(kinds.tolist()):
            yield points.point(int(order[kinds[order] == kind][0]))

    def _plan_point(
        self, front: Frontier, point: Point, told: Callable[[Enumeration], None]
    ) -> None:
        following = front.next_point(unseen=self.facts.small is None)
        if following is not None and self._in_time(following):
            self.evaluator.ahead(self.strategy(following))
        by_hand = bool(Points.one(point).by_hand[0])
        measures = self.plan(str(point), self.strategy(point), by_hand)
        self._points[point] = measures
        if isinstance(measures, Measures):
            self.estimates.learn(point, measures)
        told(self)

    def _may_look(self) -> bool:
        """True where small steps of one more point may be planned: some of the time is for whole ones."""
        return self.affords() and (self.planned > 0 or self.budget.part() < self.until / 2)

    def _in_time(self, point: Point) -> bool:
        """True where there should be time to plan a point."""
        if point in self.learned.points and self.evaluator.knows(self.strategy(point)):
            return True
        return self.budget.allows(0, self.estimates.seconds_of_plan(point))

    def _was_slower(self, point: Point) -> bool:
        """True where an earlier search, with something else fixed, found a point far slower than the best is now."""
        return (
            self._best is not None
            and self.learned.was_slower(point, _FAR * self._best[0])
            and not self.evaluator.knows(self.strategy(point))
        )

    def _is_unlikely(self, seconds: float) -> bool:
        times = _UNLIKELY_ROUGH if self.facts.small is None else _UNLIKELY
        return self._best is not None and seconds > times * self._best[0]

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
        left = sum(map(len, self._fronts))
        skipped = self.skipped + Counter({NO_TIME if self.budget.ends < inf else NO_MOVES: left})
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
            self.locality,
            why_not(self._by_hand, best, self._sources()),
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
            soon = _ADDED_UP * self.evaluator.took(self.best[1])
            if not self.budget.allows(0, soon):
                return None
            whole = self._planned_whole()
            self._additive[key] = additive_part(self.facts, self.best[1], whole.deduced)
        return self._additive[key]

    def record(self) -> SearchRecord:
        """The best so far, and all that was learned; once something fits."""
        assert self.best is not None
        evaluator, facts, best = self.evaluator, self.facts, self.best[1]
        points = {**self.learned.points, **self._points}
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
            *(self._points, looked_at, estimated, floors.least, floors.memory, floors.limit)
        )
