"""The state of a search: what was planned, the candidates that are left, what there is time for, and the result."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import inf
from typing import TypeAlias, TypeGuard, final

import numpy as np

from weft.errors import UserError
from weft.search.additive import AdditivePart, additive_part
from weft.search.budget import Budget
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.estimate import Estimates
from weft.search.evaluator import Evaluator, PlannedWhole, Probes
from weft.search.lower_bounds import LowerBounds
from weft.search.measures import Answer, Measures, TooSlow, Unplannable, key_of
from weft.search.queue import CandidateQueue
from weft.search.record import Learned, SearchRecord
from weft.search.result import PlannedStrategy, SearchResult, not_searched, nothing_fits, rows
from weft.search.tuning import FAILED
from weft.search.why_not import Probed, Sources, why_not
from weft.strategy.strategy import Strategy, stage_count
from weft.units import Seconds

NO_TIME, NO_MOVES = "not reached in time", "not reached with so many moves"
NO_MOVE = "none was tried from the best: time, or the number of moves, was used up"
NO_ROOM = "take more memory than there is, whatever their plans"
NOT_QUICKER = "no quicker than the best, whatever their plans"
# Summing up layouts takes this part of a plan's seconds, about.
ADDED_UP = 0.5
# So many of the reasons for which moves were refused are in the result, the most frequent ones.
_REASONS = 3


@final
class SearchState:
    """A search: its log, with the best, and the queue of candidates.

    Args:
        evaluator: plans and simulates.
        bounds: lower bounds of candidates.
        budget: what may be spent.
        learned: of an earlier search.
        told: called with the state at each `tell`.

    Attributes:
        facts: of the step.
        estimates: of candidates.
        log: what was planned.
        queue: candidates that were not planned yet.
        candidates: the answers of candidates that were planned.
        until: the part of the seconds at which the current phase ends.
    """

    def __init__(
        self,
        evaluator: Evaluator,
        bounds: LowerBounds,
        budget: Budget,
        learned: Learned = Learned(),  # noqa: B008 (frozen)
        told: Told = lambda _: None,
    ) -> None:
        self.evaluator, self.lower_bounds, self.budget = evaluator, bounds, budget
        self.facts, self.learned = bounds.facts, learned
        self._told = told
        evaluator.learn(learned.answers, learned.longer)
        small = Probes(self.facts, evaluator)
        self.estimates = Estimates(bounds, small, self.strategy, learned)
        self.log = SearchLog(evaluator, bounds.limit)
        self.queue = CandidateQueue(CandidateTable.of(()), np.zeros(0), self.estimates)
        self._by_hand, self.candidates = CandidateTable.of(()), dict[Candidate, Answer]()
        self.until, self._skipped = 1.0, Counter[str]()
        self._additive: dict[str, AdditivePart | None] = {}

    def arrange(self, table: CandidateTable) -> None:
        """Take the candidates of a space: those that may have room; those that people write by hand have a row each."""
        self._by_hand, room = table.where(table.by_hand), self.lower_bounds.may_fit(table)
        self.leave_out(NO_ROOM, int((~room).sum()))
        table = table.where(room)
        least = self.lower_bounds.least(table)
        self.queue = CandidateQueue(table, least, self.estimates)
        self.log.least = Seconds(float(least.min(initial=inf)))

    def strategy(self, candidate: Candidate) -> Strategy:
        """The strategy of a candidate."""
        facts = self.facts
        return candidate.strategy(facts.linears, facts.base, facts.blocks, facts.experts)

    def plan_candidate(self, candidate: Candidate) -> Answer:
        """Plan a candidate and take it out of the queue."""
        self.queue.take(candidate)
        by_hand = bool(CandidateTable.of([candidate]).by_hand[0])
        found = self.log.plan(str(candidate), self.strategy(candidate), by_hand)
        if isinstance(found, Measures) and candidate not in self.candidates:
            self.estimates.learn(candidate, found)
        self.candidates[candidate] = found
        self.tell()
        return found

    def leave_out(self, why: str, count: int = 1) -> None:
        """Count candidates that are not planned, by the reason."""
        self._skipped[why] += count

    def tell(self) -> None:
        """Tell what is known so far."""
        self._told(self)

    @property
    def planned(self) -> int:
        """The number of strategies that were tried."""
        return self.log.planned

    @property
    def best(self) -> tuple[str, Strategy, Measures] | None:
        """The fastest that fits: its name, itself, and what it takes; None if none was found yet."""
        best = self.log.best
        return None if best is None else (best.name, best.strategy, best.measures)

    @property
    def bound(self) -> Seconds:
        """Seconds that any strategy of the space takes at least; 0 if nothing is known."""
        return self.log.bound

    # What there is time for.

    @contextmanager
    def until_half(self) -> Iterator[None]:
        """Let the body have half of the seconds that are left until `until`; all of so many moves."""
        before = self.until
        self.until = (self.budget.part() + before) / 2
        try:
            yield
        finally:
            self.until = before

    def affords(self) -> bool:
        """True if one more strategy may be planned: it may take as long as the longest of the last three.

        While nothing fits, their times do not matter.
        """
        soon = self.log.took_lately if self.log.best is not None else 0.0
        return (
            self.budget.allows(self.log.planned_anew, soon + self._seconds_at_end(soon))
            and self.budget.part() < self.until
        )

    def must_plan(self) -> bool:
        """True if one more candidate is planned in any case: nothing fits so far, and few were planned."""
        return self.log.best is None and len(self.candidates) < FAILED

    def in_time(self, candidate: Candidate) -> bool:
        """True if there should be time to plan a candidate."""
        if candidate in self.learned.candidates and self.evaluator.knows(self.strategy(candidate)):
            return True
        soon = self.estimates.seconds_of_plan(candidate)
        return self.budget.has(soon + self._seconds_at_end(soon))

    def may_probe(self) -> bool:
        """True if small steps of one more candidate may be planned: some of the time is for whole ones."""
        return self.affords() and (self.planned > 0 or self.budget.part() < self.until / 2)

    def probes_in_time(self, candidate: Candidate) -> bool:
        """True if there should be time to probe a candidate: many micro-batches take
        longer.
        """
        return self.budget.has(self.estimates.seconds_of_probe(candidate))

    def _seconds_at_end(self, unknown: float) -> float:
        """Seconds in which the best is planned once more at the end: another process, or an earlier search, did it.

        Args:
            unknown: seconds of such a plan where nothing says them.
        """
        best = self.log.best
        if best is None or best.whole is not None:
            return 0.0
        return self.evaluator.took(best.strategy) or unknown

    def end(self) -> None:
        """Take the budget for used up: what a result says beyond what is known is left out, where it takes long."""
        self.budget = replace(self.budget, moves=0)

    # What comes out.

    def result(self) -> SearchResult:
        """The result of the search.

        Raises:
            UserError: no strategy that was planned fits.
        """
        log, left = self.log, len(self.queue) + self.queue.left_out
        skipped = self._skipped + Counter({NO_TIME if self.budget.ends < inf else NO_MOVES: left})
        if log.best is None:
            raise UserError(nothing_fits(log.tried.values(), self.lower_bounds.limit, left))
        best, whole = log.best, self._whole(log.best)
        estimates, lower_bounds = self.estimates, self.lower_bounds
        probed = [flat for flat, look in estimates.looks.items() if look.answer is not None]
        known = self.candidates, probed, estimates.measures
        sources = Sources(*known, lower_bounds.least, lower_bounds.memory, lower_bounds.limit)
        return SearchResult(
            best.strategy,
            whole.simulation,
            self.bound,
            rows(log.tried, key_of(best.strategy), self.lower_bounds.limit),
            {**skipped, **dict(log.refused.most_common(_REASONS))},
            not_searched(self.facts.statistics),
            log.locality or NO_MOVE,
            why_not(self._by_hand, best.measures, sources),
            self.additive(best),
            tuple(log.course),
            record=self.record(),
        )

    def _whole(self, best: Best) -> PlannedWhole:
        """All that a plan of the best says; it is made once more where another process, or search, has made it."""
        if best.whole is None:
            best = self.log.best = replace(best, whole=self.evaluator.whole(best.strategy))
        assert best.whole is not None
        return best.whole

    def additive(self, best: Best) -> AdditivePart | None:
        """The additive part of the best; None if it cannot be said, or time does not suffice."""
        key = key_of(best.strategy)
        if key not in self._additive:
            if not self.budget.has(ADDED_UP * self.evaluator.took(best.strategy)):
                return None
            whole = self._whole(best)
            self._additive[key] = additive_part(self.facts, best.strategy, whole.deduced)
        return self._additive[key]

    def record(self) -> SearchRecord:
        """The best so far, and all that was learned; once something fits."""
        assert self.log.best is not None
        evaluator, facts = self.evaluator, self.facts
        candidates = {**self.learned.candidates, **self.candidates}
        looks = dict(self.estimates.looks)
        learned = Learned(dict(evaluator.answers), evaluator.longer, candidates, looks)
        step, machine = facts.step.fingerprint, facts.machine.fingerprint
        return SearchRecord(self.log.best.strategy, facts.base, step, machine, learned)


# Is given the search so far, after each strategy.
Told: TypeAlias = Callable[[SearchState], None]


# What continues where no moves are tried.
POINTS = "points"


@final
@dataclass(frozen=True)
class Best:
    """The fastest strategy that fits.

    Attributes:
        name: a readable name.
        strategy: as it was planned.
        measures: what it takes.
        whole: its full plan; None if another process or an earlier search planned it.
    """

    name: str
    strategy: Strategy
    measures: Measures
    whole: PlannedWhole | None = None


@final
class SearchLog:
    """Plans strategies, each once, and keeps the results.

    Args:
        evaluator: plans and simulates.
        limit: bytes of memory; None if it is not known.

    Attributes:
        tried: what was planned, by the key of each strategy, but for moves that did not become the best.
        best: of it; None if nothing fits.
        least: seconds that any strategy of the space takes at least; 0 if that is not known.
        course: everything that was tried, in order.
        refused: how many moves were refused, by the reason.
        locality: knowledge of moves from the best, in words; "" if there is none. It counts until another one is
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
        """Seconds that any strategy of the space takes at least; 0 if nothing is known."""
        return min(self.least, self.quickest)

    @property
    def took_lately(self) -> float:
        """Seconds of the longest of the last three plans; 0 before any."""
        return max(self._took[-3:], default=0.0)

    def fits(self, found: Answer | TooSlow) -> TypeGuard[Measures]:
        """True if a strategy can be planned, is known whole, and takes no more memory than the limit."""
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

    def move(self, name: str, strategy: Strategy, most: Seconds) -> Answer | TooSlow:
        """Plan a strategy that a move led to, and simulate it if it may be fast enough.

        Only strategies that become the best are listed as tried.
        """
        key = key_of(strategy)
        known = self._evaluator.knows(strategy, most)
        found = self._evaluator.within(strategy, most)
        if isinstance(found, Unplannable) and key not in self._known:
            self.refused[f"refused: {found.why}"] += 1
        self._note(key, name, strategy, found, known)
        return found

    def _note(
        self, key: str, name: str, strategy: Strategy, found: Answer | TooSlow, known: bool
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
        if not isinstance(found, Unplannable):
            return ""
        del self.tried[key], self._known[key]
        return found.why.splitlines()[0]

    def best_staged_otherwise(self, best: Best) -> Best | None:
        """The fastest that has room, with stages where the best has none, or without where it has some; else None."""
        staged = stage_count(best.strategy) > 1
        others = [
            Best(name, strategy, found)
            for name, strategy, found, _ in self.tried.values()
            if self.fits(found) and (stage_count(strategy) > 1) != staged
        ]
        return min(others, key=lambda each: each.measures.seconds, default=None)

    @contextmanager
    def in_chain(self, name: str) -> Iterator[None]:
        """Record what the body plans under a name of its own in the log of the search, such as "descent 2"."""
        before, self._begun = self._chain, self._begun + 1
        self._chain = f"{name} {self._begun}"
        try:
            yield
        finally:
            self._chain = before
