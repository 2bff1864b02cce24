"""Candidates of the space, planned one after the other, those first that should be the fastest."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from math import inf
from typing import final

import numpy as np

from weft.ir.logical import Input
from weft.layout import split
from weft.search.additive import additive_part
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable, Mask, kinds_of
from weft.search.measures import Measures
from weft.search.space import fits
from weft.search.state import ADDED_UP, NO_TIME, NOT_QUICKER, SearchState
from weft.search.tuning import ABOUT, FAILED, LIKELY, LIKELY_UNSEEN, SLOWER

SLOWER_BEFORE = "far slower in the search that this one starts from, with something else fixed"
# So many of the next candidates are looked at ahead, and so many are gone through for one whose plan ends soon.
_AHEAD, _NEXT = 8, 512
# While nothing fits and time is short, a plan may take so many times as long as the quickest: a plan with twice the
# micro-batches takes a third longer.
_SOON = 1.5


@final
class Enumeration:
    """Plans candidates for a search, while its budget lasts."""

    def __init__(self, state: SearchState) -> None:
        self._state, self._queue = state, state.queue
        self._facts, self._estimates = state.facts, state.estimates
        self._by_hand: Mask = state.queue.candidates.by_hand
        # Candidates with fewer blocks that run again, which took another's place; and those others, once they stand
        # again.
        self._offered, self._whole = set[Candidate](), set[Candidate]()

    @property
    def is_crowded(self) -> bool:
        """True if data parallel on all ranks lacks room, as far as is known."""
        return not self._estimates.has_room(Candidate(len(self._facts.ranks)))

    def probe_kinds(self) -> None:
        """Probe the best candidate, by estimate, of each kind of handwritten strategy.

        It probes with small steps if there are any, else with a plan of the whole step. It ends before probes use up
        the time for a plan of the best.
        """
        state, plan, took = self._state, 0.0, 0.0
        for candidate in self._one_of_each_kind():
            if not state.affords() or (plan and not state.budget.has(plan + took)):
                return
            if not state.probes_in_time(candidate):
                continue
            begin = state.budget.now()
            if self._facts.small is None:
                state.plan_candidate(candidate)
            else:
                self._estimates.look(candidate)
                if self._estimates.has_room(candidate):
                    soon = self._estimates.seconds_of_plan(candidate)
                    plan = min(plan, soon) if plan else soon
            took = state.budget.now() - begin

    def _one_of_each_kind(self) -> list[Candidate]:
        """The fastest candidate of each kind; first kinds without a tensor axis or stages, whose ranks are alike.

        Among candidates of about equal speed, few micro-batches win, because they are planned quickly. Kinds that
        exceed the memory by far more than the estimate's error are left out.
        """
        candidates = self._queue.candidates.where(self._by_hand & self._queue.left)
        outlook = self._estimates.of(candidates)
        kinds, seconds, over = kinds_of(candidates), outlook.seconds(), outlook.over()
        order, found = np.lexsort((seconds, candidates.micro_batches)), list[Candidate]()
        for kind in sorted(set(kinds[over <= ABOUT].tolist())):
            quick = (kinds == kind) & (seconds <= ABOUT * seconds[kinds == kind].min())
            found.append(candidates.candidate(int(order[quick[order]][0])))
        return found

    def probe_smallest(self) -> None:
        """If data parallelism does not fit, probe fully sharded data parallelism until a candidate fits.

        It probes with small steps, with and without recomputed blocks. Without small steps, or if moves replace
        seconds, it plans candidates that recompute all blocks.
        """
        state, candidates = self._state, self._queue.candidates
        among: Mask = (candidates.data == len(self._facts.ranks)) & (candidates.zero == 3)
        among &= candidates.tensor * candidates.stages == 1
        whole = self._facts.small is None or state.budget.moves < inf
        if whole:
            among &= candidates.recompute == self._estimates.blocks
        for _ in range(FAILED if self.is_crowded else 0):
            every = self._queue.first(among)
            if not every or not state.affords() or not state.probes_in_time(every[0][0]):
                return
            candidate, _ = every[0]
            if whole:
                has_room = state.log.fits(state.plan_candidate(candidate))
            else:
                self._estimates.look(candidate)
                has_room = self._estimates.has_room(candidate)
            if has_room:
                return

    def plan(self, by_hand: bool, *, likely: bool) -> None:
        """Plan candidates, the fastest by estimate first, while the budget lasts.

        Args:
            by_hand: handwritten candidates, or the others; both as long as nothing fits.
            likely: only those that should be faster than the best.
        """
        state, queue = self._state, self._queue
        while state.affords() or state.must_plan():
            if state.log.best is not None:
                state.leave_out(NOT_QUICKER, queue.drop(state.log.quickest))
            own = self._by_hand if by_hand else ~self._by_hand
            among = own if state.log.best is not None else np.ones_like(own)
            candidate = self._next(among, likely)
            if candidate is None:
                return
            # One with fewer blocks that run again is none of the space.
            came_out = int(queue.take(candidate))
            if not state.must_plan() and not state.in_time(candidate):
                state.leave_out(NO_TIME, came_out)
            elif self._was_slower(candidate):
                state.leave_out(SLOWER_BEFORE, came_out)
            else:
                for other, _ in queue.first(among):
                    if self._is_ready(other) and state.in_time(other):
                        state.evaluator.ahead(state.strategy(other))
                state.plan_candidate(candidate)

    def others_are_better(self) -> bool:
        """True if non-handwritten candidates should beat moves from the best strategy.

        So it is if baselines do not fit in memory, or another probed candidate should be faster.
        """
        others = ~self._by_hand
        known = next(self._queue.with_room(others, looked=True), None)
        return self.is_crowded or (known is not None and known[1] < self._state.log.quickest)

    def _next(self, among: Mask, likely: bool) -> Candidate | None:
        """The next candidate; None if none is left, none is likely, or there is no time for a look at it."""
        state, queue = self._state, self._queue
        if state.log.best is None and self._facts.small is None and len(state.candidates) >= FAILED:
            return queue.smallest(among)
        while (found := self._first(among)) is not None:
            candidate, seconds = found
            if likely and not self._is_likely(seconds):
                return None
            if not self._is_ready(candidate):
                if not state.may_probe():
                    return self._known(among, likely)
                if state.probes_in_time(candidate):
                    self._look(candidate, among)
                else:
                    queue.leave_out(candidate)
            elif state.must_plan() and not state.in_time(candidate):
                return self._known(among, likely)
            elif (planned := self._with_fewer(candidate)) is not None:
                return planned
        return None

    def _look(self, candidate: Candidate, among: Mask) -> None:
        """Look at a candidate, and have those that are next planned by other processes meanwhile."""
        for other, _ in self._queue.first(among, _AHEAD):
            if not self._estimates.probed(other) and not self._estimates.ahead(other):
                break
        self._estimates.look(candidate)

    def _first(self, among: Mask) -> tuple[Candidate, float] | None:
        """The next candidate, and its seconds; while nothing fits, the fastest candidate that should fit,
        if any.
        """
        roomy = self._queue.with_room(among, looked=False) if self._state.log.best is None else ()
        return next(iter(roomy), None) or next(iter(self._queue.first(among)), None)

    def _is_ready(self, candidate: Candidate) -> bool:
        """True if nothing is to be looked at before a candidate is planned."""
        return self._facts.small is None or self._estimates.probed(candidate)

    def _is_likely(self, seconds: float) -> bool:
        times = LIKELY_UNSEEN if self._facts.small is None else LIKELY
        return seconds <= times * self._state.log.quickest

    def _with_fewer(self, candidate: Candidate) -> Candidate | None:
        """The candidate with the fewest recomputed blocks that fits; None if it came out before.

        The candidate takes its own place in the order then.
        """
        if self._facts.small is None or candidate in self._whole:
            return candidate
        fewer = self._estimates.just_enough(candidate)
        if fewer == candidate or fewer not in self._offered:
            self._offered.add(fewer)
            return fewer
        self._whole.add(candidate)
        self._queue.as_it_stands(candidate)
        return None

    def _known(self, among: Mask, likely: bool) -> Candidate | None:
        """The fastest candidate that was looked at, should have room, and is planned in time.

        While nothing fits yet: the fastest of the candidates that are planned nearly the soonest, with room if any
        has it.
        """
        state, queue = self._state, self._queue
        looked = list(islice(queue.with_room(among, looked=True), _NEXT))
        for candidate, seconds in looked:
            if likely and not self._is_likely(seconds):
                return None
            if state.in_time(candidate) and (planned := self._with_fewer(candidate)) is not None:
                return planned
        if state.log.best is not None:
            return None
        roomy = looked or list(islice(queue.with_room(among, looked=False), _NEXT))
        every = [candidate for candidate, _ in roomy or queue.first(among, _NEXT)]
        took = {candidate: self._estimates.seconds_of_plan(candidate) for candidate in every}
        soon = _SOON * min(took.values(), default=0.0)
        quickest = next((candidate for candidate in every if took[candidate] <= soon), None)
        return None if quickest is None else self._with_fewer(quickest) or quickest

    def _was_slower(self, candidate: Candidate) -> bool:
        """True if an earlier search, with something else fixed, found a candidate far slower than the best is
        now.
        """
        state = self._state
        return (
            state.log.best is not None
            and state.learned.was_slower(candidate, SLOWER * state.log.quickest)
            and not state.evaluator.knows(state.strategy(candidate))
        )

    def plan_cheapest(self) -> None:
        """Plan the cheapest layouts on all ranks, and split vocabularies, which no candidate covers.

        These strategies have nothing else. From a pipeline, moves would reach them only after many steps, because its
        stages have few layouts.
        """
        state, candidate = self._state, Candidate(len(self._facts.ranks))
        splits = self._facts.samples >= candidate.data > 1 and fits(candidate, self._facts.base)
        # Strategies of an earlier search count as starts, also when something else was fixed.
        known = candidate in state.learned.candidates
        if known or not splits or not (len(self._queue) or state.planned):
            return
        if self._facts.small is not None and self.is_crowded and state.budget.moves < inf:
            return
        # Tables, and layers after a loss, whose rows the ranks divide.
        values = {node.key: node.value for node in self._facts.step.graph.of_kind(Input)}
        keys = self._facts.vocabularies
        parted = [key for key in keys if values[key].shape[0] % candidate.data == 0]
        if not self._is_quickly_planned(candidate, 3 + bool(parted)) or not state.affords():
            return
        found = state.plan_candidate(candidate)
        if not isinstance(found, Measures) or not state.affords():
            return
        strategy = state.strategy(candidate)
        if parted:
            laid = {**dict.fromkeys(parted, split(0)), **strategy.parameters}
            name, laid_out = f"{candidate}; vocabularies split", replace(strategy, parameters=laid)
            state.log.plan(name, laid_out, True)
            state.tell()
        whole = state.evaluator.whole(strategy)
        added = additive_part(self._facts, strategy, whole.deduced)
        if added is not None:
            # Deduction may give the same signatures, and moves are free then to change what depends on parameters.
            bare = replace(added.cheapest, signatures=self._facts.base.signatures)
            state.log.plan(f"{candidate}; cheapest layouts", bare)
            state.log.plan(f"{candidate}; cheapest layouts, signatures fixed", added.cheapest)
            state.tell()

    def _is_quickly_planned(self, candidate: Candidate, plans: int) -> bool:
        """True if so many plans of its layouts end in this part of the time, as far as is known."""
        state = self._state
        if self._facts.small is not None:
            may_fit = state.lower_bounds.may_fit(CandidateTable.of([candidate]))[0]
            if not may_fit or not state.may_probe():
                return False
            self._estimates.look(candidate)
            if self._estimates.measures(candidate) is None:
                return False
        soon = (plans + ADDED_UP) * self._estimates.seconds_of_plan(candidate)
        return state.budget.part(soon) < state.until
