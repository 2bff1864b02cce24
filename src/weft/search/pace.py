"""Questions about time: whether one more strategy may be planned, or looked at, before the budget of a search ends."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import final

from weft.search.space.point import Point
from weft.search.state import SearchState


@final
@dataclass(frozen=True)
class Pace:
    """Says what there is time for."""

    state: SearchState

    @contextmanager
    def until_half(self) -> Iterator[None]:
        """Let the body have half of the seconds that are left until `state.until`; all of so many moves."""
        before = self.state.until
        self.state.until = (self.state.budget.part() + before) / 2
        try:
            yield
        finally:
            self.state.until = before

    def affords(self) -> bool:
        """True where one more strategy may be planned: it may take as long as the longest of the last three."""
        soon = self.state.took_lately
        return self.may_plan(soon + self.state.seconds_at_end(soon))

    def may_plan(self, soon: float = 0.0) -> bool:
        """True where one more strategy may be planned that takes so many seconds, before what goes on now ends."""
        budget = self.state.budget
        return budget.allows(self.state.planned_anew, soon) and budget.part() < self.state.until

    def must_plan(self) -> bool:
        """True where one point is planned in any case: nothing fits so far, and none was."""
        return self.state.best is None and not self.state.points

    def goes_on(self) -> bool:
        """True where one more point may be planned; as long as nothing fits, what the last ones took is no matter."""
        return self.affords() or self.must_plan() or (self.state.best is None and self.may_plan())

    def in_time(self, point: Point) -> bool:
        """True where there should be time to plan a point."""
        state = self.state
        if point in state.learned.points and state.evaluator.knows(state.strategy(point)):
            return True
        soon = state.estimates.seconds_of_plan(point)
        return state.budget.has(soon + state.seconds_at_end(soon))

    def may_look(self) -> bool:
        """True where small steps of one more point may be planned: some of the time is for whole ones."""
        state = self.state
        return self.affords() and (state.planned > 0 or state.budget.part() < state.until / 2)

    def looks_in_time(self, point: Point) -> bool:
        """True where there should be time to look at a point: those of many micro-batches take longer than others."""
        return self.state.budget.has(self.state.estimates.seconds_of_look(point))

    def may_look_to_the_end(self) -> bool:
        """True where small steps may be planned as long as nothing fits: until the whole budget has gone."""
        state = self.state
        return state.facts.small is not None and state.budget.allows(state.planned)
