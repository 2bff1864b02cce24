"""The acts that a rank's queues recorded, beside its plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import final

from weft.actors.dependencies import ActKey, Dependencies
from weft.ir.plan import COMPUTE, HOST, Actor, RankPlan
from weft.runtime.recording import Record, Span


@final
@dataclass(frozen=True)
class Ran:
    """A plan, and when its acts ran.

    Attributes:
        plan: of one rank.
        record: of some steps.
    """

    plan: RankPlan
    record: Record

    @cached_property
    def queues(self) -> tuple[str, ...]:
        """The queues of the rank: compute, host, communicators."""
        found = {actor.queue for actor in self.plan.actors} - {COMPUTE, HOST}
        return (COMPUTE, HOST, *sorted(found, key=lambda name: (len(name), name)))

    @cached_property
    def dependencies(self) -> Dependencies:
        """The dependencies of its acts."""
        return Dependencies(self.plan)

    @cached_property
    def begins(self) -> dict[int, int]:
        """The begin of each step, in nanoseconds."""
        return {interval.step: interval.begin for interval in self.record.steps}

    @cached_property
    def numbers(self) -> dict[int, int]:
        """The program's number of each step."""
        return {interval.step: interval.number for interval in self.record.steps}

    @cached_property
    def rows(self) -> dict[str, list[Span]]:
        """The spans of each queue, in order."""
        rows: dict[str, list[Span]] = {queue: [] for queue in self.queues}
        for span in sorted(self.record.spans, key=lambda span: span[1]):
            rows[self.actor(span).queue].append(span)
        return rows

    @cached_property
    def spans(self) -> dict[ActKey, Span]:
        """The span of each act."""
        return {self.key(span): span for span in self.record.spans}

    def actor(self, span: Span) -> Actor:
        """The actor that acted."""
        return self.plan.actors[span[0].actor]

    def key(self, span: Span) -> ActKey:
        """The key of a record among its actor's acts."""
        act = span[0]
        return ActKey(act.actor, act.step * self.actor(span).acts + act.micro)
