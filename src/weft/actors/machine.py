"""The state machine of one queue: events in, actions out; no tensors, clocks, threads or sockets inside.

An actor acts iff every register that it consumes has an unread version and every register that it
produces has a free copy (OneFlow, arXiv 2110.15032, section 4). An event only updates the state;
an act starts when the driver of the machine asks for it (`weft.actors.rank_driver`).

An actor acts once a step, or once for each micro-batch; between such actors a register of rate 1 is
made or read by all acts of a step together (`weft.actors.messages` counts versions).

Messages are counted by queue, not by actor: a version goes to another queue once, whatever the
number of its readers there, and is acknowledged once, after the last of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heapify, heappop, heappush
from typing import Any, final

from weft.actors.invariants import QueueState, check, events_between_checks
from weft.actors.messages import (
    Act,
    Action,
    Begin,
    EndStep,
    Event,
    Finished,
    Free,
    QueueStatistics,
    Ready,
    Released,
    Send,
    Waiting,
)
from weft.actors.wiring import Port, QueueActor, issue_slots, wire
from weft.errors import InternalError
from weft.ir.plan import RankPlan


@final
class QueueMachine:
    """Decides when the actors of one queue act.

    Args:
        plan: the plan of the rank.
        queue: the queue's name.
        in_order: true if the actors act strictly in the order that the plan gives (communicators);
            otherwise, of those that may act, the first by step, priority, micro-batch and id does.
        alike: what `weft.actors.wiring.equal_registers` found, where one of equal registers is to
            stand for all.
    """

    def __init__(
        self,
        plan: RankPlan,
        queue: str,
        in_order: bool = False,
        alike: Mapping[str, str] | None = None,
    ) -> None:
        self.queue = queue
        self.in_order = in_order
        # Actors of this queue in plan order, and the registers they touch. Fixed after
        # construction.
        self._actors, self._ports = wire(plan, queue, alike)
        self._by_id = {actor.id: actor for actor in self._actors}
        # In order: whose turn each act of a step is.
        self._turns = issue_slots(plan, queue, self._actors) if in_order else ()
        # Steps begun so far; no actor has acted for step >= begun.
        self._begun = 0
        # The running act; at most one at a time, and nothing acts while it is set.
        self._running: Act | None = None
        # (step, priority, micro-batch, id) of every actor that may act, each actor at most once;
        # unused when `in_order`.
        self._ready: list[tuple[int, int, int, int]] = []
        # Acts started so far. In order, the next one is that of `turns[started % len(turns)]`.
        self.started = 0
        # For every step begun and not ended: how many actors have not finished all their acts of it.
        # Never zero or negative.
        self._left: dict[int, int] = {}
        self._handlers: dict[type, Callable[[Any, list[Action]], None]] = {
            Begin: self._begin,
            Ready: self._arrive,
            Released: self._acknowledge,
            Finished: self._finish,
        }
        # While debugging: events until the next check, and between two of them. Otherwise 0.
        self._unchecked = 0
        self._between = events_between_checks(self.state())

    def handle(self, event: Event) -> list[Action]:
        """Handle one event and return the actions to take now, in order. It starts no act.

        Raises:
            InternalError: when the event contradicts the state, such as a version that comes out of
                order.
        """
        actions: list[Action] = []
        self._handlers[type(event)](event, actions)
        if self._between:
            self._check()
        return actions

    def start(self) -> Act | None:
        """Start the next act; None while one runs, or when none may start."""
        if self._running is not None:
            return None
        actor = self._next()
        return None if actor is None else self._start(actor)

    def start_act(self, id: int, micro: int) -> Act:
        """Start the act of an actor for a micro-batch, out of turn where the queue keeps no order.

        Raises:
            InternalError: when it may not act now, or not for this micro-batch.
        """
        actor = self._by_id.get(id)
        if actor is None or self._running or actor.waits or actor.acted % actor.acts != micro:
            raise InternalError(f"{self.queue}: actor {id} may not act now for micro-batch {micro}")
        if self.in_order:
            if self._next() is not actor:
                raise InternalError(f"{self.queue}: it is not the turn of actor {id}")
        else:
            self._ready = [entry for entry in self._ready if entry[-1] != id]
            heapify(self._ready)
        return self._start(actor)

    def finish(self) -> list[Action]:
        """The actions that `handle` gives when the act that runs has been done: the short way for whoever ran it."""
        act = self._running
        if act is None:
            raise InternalError(f"{self.queue}: nothing runs that could have finished")
        actions: list[Action] = []
        self._running = None
        self._finished(act.actor, act.step, act.micro, actions)
        if self._between:
            self._check()
        return actions

    @property
    def upcoming(self) -> Act | None:
        """The act that `start` would start now; None if the queue keeps no order."""
        if not self._turns or self._running is not None:
            return None
        actor = self._turns[self.started % len(self._turns)]
        return None if actor.waits else Act(actor.id, *divmod(actor.acted, actor.acts))

    def readers_left(self, register: str, version: int) -> int:
        """The number of actors of this queue that have not finished with a version, those that run included."""
        return self._ports[register].local.get(version, 0)

    def statistics(self) -> QueueStatistics:
        """A snapshot: what runs, and what every actor that has steps left waits for."""
        waiting = tuple(
            _waiting(actor)
            for actor in self._actors
            if actor.acted < self._begun * actor.acts
            and (self._running is None or actor.id != self._running.actor)
        )
        return QueueStatistics(
            self.queue, self._begun, self.started, self._running, waiting, self._turn()
        )

    def state(self) -> QueueState:
        """The whole state of the machine, for invariant checks."""
        return QueueState(
            self.queue,
            self._actors,
            self._ports,
            self._turns,
            self.in_order,
            self._begun,
            self.started,
            self._running,
            self._ready,
            self._left,
        )

    def check_invariants(self) -> None:
        """Check what always holds between two events (`weft.actors.invariants`).

        Raises:
            InternalError: when an invariant fails: a bug in this machine, not in its user.
        """
        check(self.state())

    def _check(self) -> None:
        """While debugging, check after every event, or after every few."""
        self._unchecked -= 1
        if self._unchecked <= 0:
            self._unchecked = self._between
            self.check_invariants()

    def _turn(self) -> int | None:
        if self._running is not None:
            return self._running.actor
        return self._turns[self.started % len(self._turns)].id if self._turns else None

    def _begin(self, event: Begin, actions: list[Action]) -> None:
        if event.step != self._begun:
            raise InternalError(f"{self.queue}: step {event.step} begins after {self._begun} steps")
        self._begun += 1
        if not self._actors:
            actions.append(EndStep(event.step))
            return
        self._left[event.step] = len(self._actors)
        for actor in self._actors:
            if actor.acted == event.step * actor.acts:
                self._met(actor)

    def _arrive(self, event: Ready, actions: list[Action]) -> None:
        port = self._ports.get(event.register)
        if port is None or port.producer is not None or event.version != port.arrived:
            raise InternalError(f"{self.queue}: unexpected {event}")
        self._put(port)

    def _acknowledge(self, event: Released, actions: list[Action]) -> None:
        port = self._ports.get(event.register)
        if port is None or not port.remote.get(event.version, 0):
            raise InternalError(f"{self.queue}: unexpected {event}")
        port.remote[event.version] -= 1
        self._settle(port, event.version)

    def _finish(self, event: Finished, actions: list[Action]) -> None:
        running: tuple[int, ...] | None = self._running
        if running != event:  # named tuples are equal when their fields are
            raise InternalError(f"{self.queue}: {event} while {self._running} runs")
        self._running = None
        self._finished(*event, actions)

    def _finished(self, id: int, step: int, micro: int, actions: list[Action]) -> None:
        actor = self._by_id[id]
        act = actor.acted - 1
        for port in actor.produces:
            self._publish(port, act + port.full, actions)
        self._read(actor.consumes, act, actions)
        if actor.acts > 1:
            if micro + 1 < actor.acts:
                return
            for port in actor.fills:
                self._publish(port, step + port.full, actions)
            self._read(actor.holds, step, actions)
        self._left[step] -= 1
        if not self._left[step]:
            del self._left[step]
            actions.append(EndStep(step))

    def _start(self, actor: QueueActor) -> Act:
        """Take the inputs and copies of an act, and count what the actor's next one lacks."""
        self.started += 1
        step, micro = actor.acted, 0
        following = actor.acted = step + 1
        if actor.acts == 1:
            waits = int(following == self._begun)
        else:
            step, micro = divmod(step, actor.acts)
            waits = self._start_part(actor, step, micro)
        for port in actor.consumes:
            waits += port.arrived == following
        waits += self._take(actor.produces)
        actor.waits = waits
        if not waits:
            self._may_act(actor)
        self._running = act = Act(actor.id, step, micro)
        if self._between:
            self._check()
        return act

    def _start_part(self, actor: QueueActor, step: int, micro: int) -> int:
        """Take a step's copies before its first act; after its last, count what the next lacks."""
        if not micro:
            self._take(actor.fills)
        if micro + 1 < actor.acts:
            return 0
        late = sum(port.arrived == step + 1 for port in actor.holds)
        full = sum(port.taken == port.credits for port in actor.fills)
        return late + full + (step + 1 == self._begun)

    def _take(self, ports: tuple[Port, ...]) -> int:
        """Take a copy of each register; how many of them have none left."""
        exhausted = 0
        for port in ports:
            port.taken += 1
            if port.taken >= port.credits:
                exhausted += 1
                if port.taken > port.credits:
                    raise InternalError(f"{self.queue}: no copy of {port.register} is free")
        return exhausted

    def _next(self) -> QueueActor | None:
        if not self.in_order:
            return self._by_id[heappop(self._ready)[-1]] if self._ready else None
        if not self._turns:
            return None
        actor = self._turns[self.started % len(self._turns)]
        return None if actor.waits else actor

    def _met(self, actor: QueueActor) -> None:
        actor.waits -= 1
        if not actor.waits:
            self._may_act(actor)

    def _may_act(self, actor: QueueActor) -> None:
        if self.in_order:
            return
        step, micro = actor.acted, 0
        if actor.acts > 1:
            step, micro = divmod(step, actor.acts)
        heappush(self._ready, (step, actor.priority, micro, actor.id))

    def _put(self, port: Port) -> None:
        """A version is there: readers that waited for just this one wait no more for it."""
        version = port.arrived
        port.arrived = version + 1
        if port.count:
            port.local[version] = port.count
        for actor in port.readers:
            if actor.acted == version:
                self._met(actor)
        for actor in port.holders:
            if actor.acted == version * actor.acts:
                self._met(actor)

    def _publish(self, port: Port, version: int, actions: list[Action]) -> None:
        """A version made on this queue goes to its readers, here and on other queues."""
        if version != port.arrived:
            raise InternalError(
                f"{self.queue}: version {version} of {port.register} after {port.arrived}"
            )
        self._put(port)
        if port.queues:
            port.remote[version] = len(port.queues)
            event = Ready(port.register, version)
            actions.extend([Send(queue, event) for queue in port.queues])
        if not port.count:
            actions.append(Free(port.register, version))
            self._settle(port, version)

    def _read(self, ports: tuple[Port, ...], version: int, actions: list[Action]) -> None:
        """A reader is done with a version of each register; the queue's last one gives it back."""
        for port in ports:
            left = port.local[version] - 1
            if left:
                port.local[version] = left
            else:
                self._release(port, version, actions)

    def _release(self, port: Port, version: int, actions: list[Action]) -> None:
        """The last reader of this queue is done with a version."""
        del port.local[version]
        if port.producer is None:
            actions.append(Send(port.source, Released(port.register, version)))
        else:
            self._settle(port, version)

    def _settle(self, port: Port, version: int) -> None:
        """Give a copy back to its producer once neither this queue nor another one reads it."""
        if version in port.local or port.remote.get(version, 0):
            return
        if port.queues:
            port.remote.pop(version, None)
        port.taken -= 1
        actor = port.producer
        if port.taken < 0 or actor is None:
            raise InternalError(f"{self.queue}: {port.register} released more often than made")
        # In the middle of a version the producer does not wait for a copy of the next one.
        if port.taken == port.credits - 1 and not actor.acted % port.span:
            self._met(actor)


def _waiting(actor: QueueActor) -> Waiting:
    """The inputs and credits that the next act of an actor lacks."""
    step, micro = divmod(actor.acted, actor.acts)
    versions = [port.register for port in actor.consumes if port.arrived <= actor.acted]
    versions += [port.register for port in actor.holds if port.arrived <= step]
    produces = actor.produces if micro else (*actor.produces, *actor.fills)
    copies = tuple(port.register for port in produces if port.taken >= port.credits)
    return Waiting(actor.id, step, tuple(versions), copies, micro)
