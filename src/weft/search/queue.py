"""The candidates that were not planned yet, the one first that should be the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from typing import final

import numpy as np

from weft.cached import cached_property
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable, Floats, Mask
from weft.search.estimate import Estimates, MemoryOutlook
from weft.search.measures import Unplannable
from weft.units import Seconds


@final
class CandidateQueue:
    """Candidates in the order of estimates that grow better while they are planned.

    Args:
        candidates: all.
        least: seconds that each takes at least.
        estimates: of them.

    Attributes:
        candidates: all, planned or not.
        left: those that are left.
        left_out: candidates removed because there was no time to probe them.
    """

    def __init__(self, candidates: CandidateTable, least: Floats, estimates: Estimates) -> None:
        self.candidates, self._least, self._estimates = candidates, least, estimates
        self.left: Mask = np.ones(len(candidates), np.bool_)
        self.left_out = 0
        # Candidates whose small steps were planned, or cannot be; those that stand for others with fewer blocks again.
        self._looked: Mask = np.zeros(len(candidates), np.bool_)
        self._refused: Mask = np.zeros(len(candidates), np.bool_)
        self._as_few: Mask = np.ones(len(candidates), np.bool_)
        self._order: Floats = np.zeros(len(candidates))
        self._known, self._looks = -1, 0

    def __len__(self) -> int:
        return int(self.left.sum())

    @cached_property
    def _outlook(self) -> MemoryOutlook:
        return self._estimates.of(self.candidates)

    def _now(self) -> Floats:
        """Seconds by which all candidates are ordered now; endless where they cannot be planned."""
        known = len(self._estimates.measured) + len(self._estimates.looks)
        if known != self._known:
            self._note_looks()
            self._order = self._outlook.seconds(self._as_few)
            self._order[self._refused] = inf
            self._known = known
        return self._order

    def _note_looks(self) -> None:
        looks = list(self._estimates.looks.items())
        for flat, look in looks[self._looks :]:
            alike = self.candidates.flat_as(flat)
            self._looked |= alike
            if isinstance(look.answer, Unplannable):
                self._refused |= alike
        self._looks = len(looks)

    def drop(self, seconds: Seconds) -> int:
        """Leave out all candidates that take at least so long whatever their plan; their number."""
        gone: Mask = self.left & (self._least >= seconds)
        self.left &= ~gone
        return int(gone.sum())

    def take(self, candidate: Candidate) -> bool:
        """Leave out a candidate, which is planned; false where it is none of those that are left."""
        number = self.candidates.number(candidate)
        was_left = number is not None and bool(self.left[number])
        if number is not None:
            self.left[number] = False
        return was_left

    def leave_out(self, candidate: Candidate) -> None:
        """Leave out a candidate for want of time to look at it."""
        self.take(candidate)
        self.left_out += 1

    def as_it_stands(self, candidate: Candidate) -> None:
        """Have a candidate stand for itself, with all its blocks again: one with fewer of them has been offered."""
        number = self.candidates.number(candidate)
        if number is not None:
            self._as_few[number] = False
            self._known = -1

    def first(self, among: Mask, count: int = 1) -> Sequence[tuple[Candidate, float]]:
        """The next candidates of those that are left, with the seconds by which they are ordered."""
        now = np.where(self.left & among, self._now(), inf)
        count = min(count, int((self.left & among).sum()))
        if count == 1:
            every = [int(now.argmin())]
            # All that are left may be endless.
            every = every if now[every[0]] < inf else [int((self.left & among).argmax())]
        else:
            near = np.argpartition(now, min(count, len(now) - 1))[:count].tolist() if count else []
            every = sorted(near, key=lambda one: (now[one], one))
        return [(self.candidates.candidate(one), float(now[one])) for one in every]

    def with_room(self, among: Mask, looked: bool) -> Iterator[tuple[Candidate, float]]:
        """Remaining candidates that should fit, the fastest first; with `looked` only probed ones.

        Where none has as much to spare as estimates err by, those that just should.
        """
        now, over = self._now(), self._outlook.over()
        counts = self.left & among & ~self._refused & (self._looked | (not looked))
        roomy: Mask = counts & (over * self._outlook.spare <= 1)
        numbers = np.flatnonzero(roomy if roomy.any() else counts & (over <= 1))
        for number in numbers[np.argsort(now[numbers], kind="stable")]:
            yield self.candidates.candidate(int(number)), float(now[number])

    def smallest(self, among: Mask) -> Candidate | None:
        """The candidate that takes the least memory by estimate, of equal ones the fastest."""
        counts = self.left & among
        if not counts.any():
            return None
        memory = np.where(counts, self._outlook.memory(), inf)
        least = np.flatnonzero(memory <= memory.min())
        return self.candidates.candidate(int(least[self._now()[least].argmin()]))
