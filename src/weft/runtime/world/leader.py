"""The launcher's side of going on in place: it leads the ranks that are left into a new world, if that can be.

Where a process has died, or does not answer the others, the rest are told to stop. Once each has said that its old
world has ended, they get the variables of a new one, under the number of the next start. Whatever else happens on the
way, and a failure that a rank has of itself, is left to a restart of all. This module needs no torch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import final

from weft.runtime.world.in_place.line import (
    CANNOT,
    FAILED,
    GO,
    INSIDE,
    OUTSIDE,
    READY,
    RESTART_ALL,
    STOP,
)
from weft.runtime.world.launch import Fleet
from weft.runtime.world.processes import Exit, Happening, Processes, Said

# Seconds in which all ranks that wait fail once one has said that another does not answer; the others are silent.
SILENT_SECONDS = 2.5
# Seconds in which a word is heard.
HEARD_SECONDS = 0.5
# Seconds in which ranks must have ended their old world; and in which new processes must have come to their work.
STOP_SECONDS, START_SECONDS = 5.0, 120.0


@final
@dataclass
class Starts:
    """The starts of the ranks of a run on one node: how many there were, and how many there may be.

    Attributes:
        ranks: of the last start.
        restarts: how often they may be started again.
        least: ranks that a restart needs, each of which has one fewer than the start before; None for as many.
        number: of the last start, from 0.
    """

    ranks: int
    restarts: int = 0
    least: int | None = None
    number: int = 0

    @property
    def left(self) -> bool:
        """True where they may be started once more."""
        return self.number < self.restarts

    @property
    def next_ranks(self) -> int:
        """The ranks of the next start."""
        return self.ranks if self.least is None else max(self.least, self.ranks - 1)

    def begin_next(self, ranks: int | None = None) -> None:
        """The next start begins, on so many ranks; None for those of `next_ranks`."""
        self.ranks, self.number = self.next_ranks if ranks is None else ranks, self.number + 1


@final
class Leader:
    """Leads the ranks of one node on in place.

    Args:
        starts: of the run; counts those in place, too.
        variables: of all ranks of a start, by its number, where they are other than those of the one before.
        cause: of ends of ranks, and of the notes of those that failed because of others, the text to be told; None
            where a rank has failed by itself.
        told: called with that text once the ranks go on, just before they do.
        asks: the signal for ranks that do not answer, before they are killed.
    """

    def __init__(
        self,
        starts: Starts,
        variables: Callable[[int], Mapping[str, str]],
        cause: Callable[[Sequence[Exit], Mapping[int, str]], str | None],
        told: Callable[[str], object],
        asks: int,
    ) -> None:
        self._starts, self._variables = starts, variables
        self._cause, self._told, self._asks = cause, told, asks

    def __call__(self, ranks: Processes, first: Happening) -> Happening | None:
        """Lead on after something has happened; None where the ranks go on, else what ends them all."""
        ends: Happening | None = first
        if isinstance(first, Exit | Said) and self._starts.left:
            ends = self._led(ranks, first)
        if ends is not None:
            ranks.say(RESTART_ALL)
        return ends

    def _led(self, ranks: Processes, first: Exit | Said) -> Happening | None:
        if isinstance(first, Said):
            silent = self._silent(ranks)
            if silent and all(ranks.said[each] == INSIDE for each in silent):
                ranks.ask(self._asks, silent)
                ranks.kill(silent)
            if not ranks.exits:
                return first
            first = ranks.exits[0]
        # A word that was said before an end may be heard after it.
        while any(not ranks.said[rank] for rank in ranks.running) and ranks.next(HEARD_SECONDS):
            pass
        why = self._cause(ranks.exits, ranks.notes)
        if why is None or not self._may_go_on(ranks):
            return first
        return self._renewed(ranks, first, why)

    def _silent(self, ranks: Processes) -> list[int]:
        """The ranks that have not failed while one says that another did not answer; none where one has ended."""
        end = time.monotonic() + SILENT_SECONDS
        while silent := sorted(r for r in ranks.running if ranks.said[r] != FAILED):
            left = end - time.monotonic()
            if ranks.exits or left <= 0:
                break
            ranks.next(left)
        return [] if ranks.exits else silent

    def _may_go_on(self, ranks: Processes) -> bool:
        """True where all, the lost ones too, were inside of what can go on in place, and those left are enough."""
        lost, left = {each.rank for each in ranks.exits}, ranks.running
        return (
            bool(left)
            and all(each.code for each in ranks.exits)
            and len(left) + len(lost) == self._starts.ranks
            and len(left) >= (self._starts.least or 1)
            and all(ranks.said[each] in (INSIDE, FAILED) for each in left | lost)
        )

    def _renewed(self, ranks: Processes, first: Exit, why: str) -> Happening | None:
        left = sorted(ranks.running)
        lost = [] if self._starts.least else [each.rank for each in ranks.exits]
        ranks.say(STOP, why.splitlines()[0])
        for end in ranks.exits:
            ranks.drop(end.rank)
        fleet, common = Fleet(len(left) + len(lost)), self._variables(self._starts.number + 1)
        variables = [{**common, **fleet.environment(rank)} for rank in range(fleet.ranks)]
        # New processes start while the old world ends, and are waited for: others wait for them no longer than
        # for ranks that start together.
        for rank in lost:
            ranks.start(rank, variables[rank])
        ends = self._until_said(ranks, READY, left, STOP_SECONDS)
        ends = ends or self._until_said(ranks, INSIDE, lost, START_SECONDS)
        if ends is not None:
            for rank in set(lost) & ranks.running:
                ranks.drop(rank)
            return first if isinstance(ends, Said) else ends
        if not lost:
            ranks.renumber({rank: number for number, rank in enumerate(left)})
        ranks.forget()
        self._starts.begin_next(fleet.ranks)
        self._told(why)
        for rank in sorted(ranks.running - set(lost)):
            ranks.said[rank] = INSIDE
            ranks.lines[rank].say(GO, json.dumps(variables[rank]))
        return None

    def _until_said(
        self, ranks: Processes, word: str, those: Sequence[int], seconds: float
    ) -> Happening | None:
        """Wait until some have said a word; gives what is in the way, a word that nobody said where that is time."""
        end = time.monotonic() + seconds
        while any(ranks.said[rank] != word for rank in those):
            found = ranks.next(max(0.0, end - time.monotonic()))
            if found is None:
                return Said(0, CANNOT, "")
            if not isinstance(found, Said) or found.word in (OUTSIDE, CANNOT):
                return found
        return None
