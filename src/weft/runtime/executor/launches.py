"""The acts of a step as one list, for devices on which work is only put on a stream.

There the host need not wait for anything: one thread puts all acts of a rank on the streams of
their queues, in an order that is fixed when compiling, and events make streams wait for each other.

The rank's machines are driven through that order once, when the list is made: an act has ended when
it is on the list, and they raise where it may not act. They do the same in every step, so the list
is all that a step needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from weft.actors import Act, RankDriver
from weft.actors.dependencies import dependencies_in_step
from weft.cached import cached_property
from weft.errors import InternalError
from weft.ir.plan import COMPUTE, Actor, Feed, Fetch, Hold, RankPlan
from weft.runtime.devices.launch import Key, Launch, Read
from weft.runtime.executor.work import Work


def launches(
    plan: RankPlan, works: Mapping[int, Work], order: Iterable[tuple[int, int]] | None = None
) -> tuple[Launch, ...]:
    """The list of a rank.

    Args:
        plan: what it runs.
        works: what its actors do, by id.
        order: (actor, micro-batch) of all acts; where acts of several ranks meet, the same on all
            of them. By default that of the plan, for plans without micro-batches.

    Raises:
        InternalError: when the order lacks an act, or an act stands where it may not act yet.
    """
    acts = [actor for actor in plan.actors if not isinstance(actor, Hold)]
    every = [(actor.id, micro) for actor in acts for micro in range(actor.acts)]
    ordered = every if order is None else list(order)
    if sorted(ordered) != sorted(every):
        raise InternalError(f"rank {plan.rank}: the order has not every act of the plan once")
    places = {act: place for place, act in enumerate(ordered)}
    recorder = _Recorder(plan, works, places)
    driver = RankDriver(plan, recorder)
    driver.begin(0)
    for act in ordered:
        driver.run(*act)
    return tuple(recorder.launches)


@final
@dataclass(frozen=True)
class _Recorder:
    """An executor that puts acts on a list (`weft.actors.rank_driver`).

    Attributes:
        launches: those started so far.
        waited: for two queues, up to which place the first has waited for the second.
    """

    plan: RankPlan
    works: Mapping[int, Work]
    places: Mapping[tuple[int, int], int]
    launches: list[Launch] = field(default_factory=list)
    waited: dict[tuple[str, str], int] = field(default_factory=dict)

    @cached_property
    def dependencies(self) -> dict[tuple[int, int], tuple[tuple[int, int], ...]]:
        """The acts of the step that each act needs."""
        return dependencies_in_step(self.plan)

    @cached_property
    def producers(self) -> dict[str, int]:
        """The actor that makes each register."""
        return {r.value.name: r.producer for r in self.plan.registers}

    @cached_property
    def last(self) -> dict[Key, int]:
        """The last place at which each version is read."""
        last: dict[Key, int] = {}
        for (actor, micro), place in self.places.items():
            for name in self.works[actor].reads:
                key = self._key(actor, micro, name)
                last[key] = max(place, last.get(key, -1))
        return last

    def start(self, act: Act) -> bool:
        """Put an act on the list, where it has ended for those that come after it."""
        self.launches.append(self._launch(act.actor, act.micro))
        return True

    def free(self, register: str, version: int) -> None:
        """A launch says itself what it reads last."""

    def _launch(self, actor: int, micro: int) -> Launch:
        place, queue = self.places[actor, micro], _queue(self.plan.actors[actor])
        work = self.works[actor]
        reads = tuple(self._read(actor, micro, name) for name in work.reads)
        writes = tuple(self._written(actor, micro, name) for name in work.writes)
        waits = self._waits(place, queue, self.dependencies[actor, micro])
        return Launch(place, actor, micro, queue, reads, writes, waits)

    def _key(self, actor: int, micro: int, name: str) -> Key:
        once = name in self.works[actor].once
        return name, 0 if once else micro

    def _read(self, actor: int, micro: int, name: str) -> Read:
        key = self._key(actor, micro, name)
        maker = self.plan.actors[self.producers[name]]
        foreign = _queue(maker) != _queue(self.plan.actors[actor])
        return Read(key, self.last[key] == self.places[actor, micro], foreign)

    def _written(self, actor: int, micro: int, name: str) -> Key | None:
        work = self.works[actor]
        if name in work.once and micro + 1 < work.acts:
            return None
        key = self._key(actor, micro, name)
        return key if key in self.last else None

    def _waits(self, place: int, queue: str, needs: Sequence[tuple[int, int]]) -> tuple[int, ...]:
        """The last needed act of each other queue, unless this queue has waited for a later one."""
        latest: dict[str, int] = {}
        for act in needs:
            other, there = _queue(self.plan.actors[act[0]]), self.places[act]
            if other != queue and there > self.waited.get((queue, other), -1):
                latest[other] = max(there, latest.get(other, -1))
        self.waited.update({(queue, other): there for other, there in latest.items()})
        return tuple(sorted(latest.values()))


def _queue(actor: Actor) -> str:
    return COMPUTE if isinstance(actor, (Feed, Fetch)) else actor.queue
