"""One rank on a device with streams: a step is a list of acts, put on its way by the thread that calls `step`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

import torch
from torch import Tensor

from weft.actors import Act, RankDriver, actor_text
from weft.actors.dependencies import dependencies_in_step
from weft.cached import cached_property
from weft.errors import InternalError
from weft.ir.plan import COMPUTE, Actor, Feed, Fetch, Hold, RankPlan
from weft.runtime.devices.backend import Key, Launch, MakeStreams, Read
from weft.runtime.executor.rank_executor import RankExecutor
from weft.runtime.executor.work import Rank, Work
from weft.runtime.recording import Recorder, Span
from weft.runtime.world.world import TIMEOUT


def launches(
    plan: RankPlan, works: Mapping[int, Work], order: Iterable[tuple[int, int]] | None = None
) -> tuple[Launch, ...]:
    """The launches of a rank.

    Args:
        order: (actor, micro-batch) of all acts; where acts of several ranks meet, the same on all
            of them. By default that of the plan, for plans without micro-batches.
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
@dataclass(eq=False)
class _Recorder:
    """An executor that puts acts on a list (`weft.actors.rank_driver`).

    Attributes:
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
        # The last needed act of each other queue, unless this queue has waited for a later one.
        needs = self.dependencies[actor, micro]
        latest: dict[str, int] = {}
        for act in needs:
            other, there = _queue(self.plan.actors[act[0]]), self.places[act]
            if other != queue and there > self.waited.get((queue, other), -1):
                latest[other] = max(there, latest.get(other, -1))
        self.waited.update({(queue, other): there for other, there in latest.items()})
        waits = tuple(sorted(latest.values()))
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


def _queue(actor: Actor) -> str:
    return COMPUTE if isinstance(actor, (Feed, Fetch)) else actor.queue


@final
class DeviceExecutor(RankExecutor):
    """Runs the plan of one rank as `ThreadExecutor` does, without threads.

    `step` returns once all work is on its way.

    Args:
        order: (actor, micro-batch) of all acts of a step, as simulated; by default that of the plan.
    """

    def __init__(
        self,
        rank: Rank,
        make_streams: MakeStreams,
        *,
        timeout: float = TIMEOUT,
        order: Iterable[tuple[int, int]] | None = None,
    ) -> None:
        plan = rank.plan
        super().__init__(plan, rank)
        self._launches = launches(plan, self._works, order)
        self._streams = make_streams(rank.device, self._launches, timeout, self._act_text)
        self.recorder = Recorder([[]], self._spans)
        for channel in rank.channels.values():
            channel.watch(self._fail)

    def close(self) -> None:
        """Close the channels, once nothing uses them any more."""
        if self._failure is None:
            self._streams.wait()
        for channel in self._rank.channels.values():
            channel.close()

    def _run(self, step: int) -> None:
        self._streams.begin()
        try:
            self._launch(step)
        except BaseException:
            self._streams.stop()
            raise
        self._streams.end(self._rank.batches.fetched.values())

    def _launch(self, step: int) -> None:
        tensors: dict[Key, Tensor] = {}
        with torch.no_grad(), torch.autocast(self._rank.device.type, enabled=False):
            for launch in self._launches:
                try:
                    self._act(launch, step, tensors)
                except BaseException as error:
                    raise self._named(Act(launch.actor, step, launch.micro), error) from error

    def _act(self, launch: Launch, step: int, tensors: dict[Key, Tensor]) -> None:
        """Put an act on its way; nothing here outlives it, so that memory goes when it is free."""
        self._streams.enter(launch)
        inputs = []
        for read in launch.reads:
            inputs.append(tensors.pop(read.key) if read.last else tensors[read.key])
            if read.foreign:
                self._streams.read(inputs[-1])
        outputs = self._works[launch.actor].act(step, launch.micro, inputs)
        self._streams.leave(launch)
        for key, tensor in zip(launch.writes, outputs, strict=True):
            if key is not None:
                tensors[key] = tensor

    def _spans(self, step: int) -> Sequence[Span]:
        times = zip(self._launches, self._streams.times(), strict=True)
        return [(Act(each.actor, step, each.micro), *both) for each, both in times]

    def _wake(self) -> None:
        """Nobody waits on the host; what waits on the device ends with the channels."""

    def _act_text(self, place: int) -> str:
        launch = self._launches[place]
        actor = self.plan.actors[launch.actor]
        when = f"micro-batch {launch.micro}" if actor.acts > 1 else "the step"
        return f"{actor_text(actor)}, {when}"
