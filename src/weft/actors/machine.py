"""The state machine of one queue: events in, actions out; no tensors, clocks, threads or sockets inside.

An actor acts iff every register that it consumes has an unread version and every register that it
produces has a free copy (OneFlow, arXiv 2110.15032, section 4). The runtime drives the machine with
threads, the simulator with a heap of virtual times.

Messages are counted by queue, not by actor: a version goes to another queue once, whatever the
number of its readers there, and is acknowledged once, after the last of them.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

from weft.actors.messages import (
    Act,
    Action,
    Begin,
    EndStep,
    Event,
    Finished,
    Free,
    Ready,
    Released,
    Send,
)
from weft.actors.statistics import QueueStatistics, Waiting
from weft.actors.wiring import Port, Task, wire
from weft.errors import InternalError
from weft.ir.plan import RankPlan


class QueueMachine:
    """Decides when the actors of one queue act.

    Args:
        plan: the plan of the rank.
        queue: the queue's name.
        in_order: whether the actors act strictly in the order of the plan (communicators);
            otherwise, among those that may act, the one of the earliest step with the lowest id
            does.
    """

    def __init__(self, plan: RankPlan, queue: str, in_order: bool) -> None:
        self.queue = queue
        self.in_order = in_order
        # Actors of this queue in plan order, and the registers they touch. Fixed after
        # construction.
        self._tasks, self._ports = wire(plan, queue)
        self._by_id = {task.id: task for task in self._tasks}
        # Steps begun so far; no task has acted for step >= begun.
        self._begun = 0
        # What runs now; at most one act at a time, and nothing acts while it is set.
        self._running: Act | None = None
        # (step, id) of every task that may act, each task at most once; unused when `in_order`.
        self._ready: list[tuple[int, int]] = []
        # Acts started so far. In order, the next one is task `started % len(tasks)`.
        self.started = 0
        # For every step begun and not ended: how many tasks have not finished it. Never zero or
        # negative.
        self._left: dict[int, int] = {}
        self._handlers: dict[type, Callable[[Any, list[Action]], None]] = {
            Begin: self._begin,
            Ready: self._arrive,
            Released: self._acknowledge,
            Finished: self._finish,
        }

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Take one event and say what is to be done now, in this order.

        Raises:
            InternalError: when the event contradicts the state, such as a version that comes out of
                order.
        """
        actions: list[Action] = []
        self._handlers[type(event)](event, actions)
        if self._running is None:
            self._start(actions)
        return tuple(actions)

    def statistics(self) -> QueueStatistics:
        """A snapshot: what runs, and what every actor that has steps left waits for."""
        waiting = tuple(
            _waiting(task)
            for task in self._tasks
            if task.acted < self._begun
            and (self._running is None or task.id != self._running.actor)
        )
        return QueueStatistics(self.queue, self._begun, self.started, self._running, waiting)

    def _begin(self, event: Begin, actions: list[Action]) -> None:
        if event.step != self._begun:
            raise InternalError(f"{self.queue}: step {event.step} begins after {self._begun} steps")
        self._begun += 1
        if not self._tasks:
            actions.append(EndStep(event.step))
            return
        self._left[event.step] = len(self._tasks)
        for task in self._tasks:
            if task.acted == event.step:
                self._met(task)

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
        if self._running is None or tuple(self._running) != tuple(event):
            raise InternalError(f"{self.queue}: {event} while {self._running} runs")
        self._running = None
        task, step = self._by_id[event.actor], event.step
        for port in task.produces:
            self._publish(port, step + port.full, actions)
        for port in task.consumes:
            port.local[step] -= 1
            if not port.local[step]:
                self._release(port, step, actions)
        self._left[step] -= 1
        if not self._left[step]:
            del self._left[step]
            actions.append(EndStep(step))

    def _start(self, actions: list[Action]) -> None:
        """Choose the next act, if there is one, and take its inputs and copies."""
        task = self._next()
        if task is None:
            return
        step = task.acted
        self.started += 1
        task.acted = step + 1
        task.waits = int(task.acted == self._begun)
        for port in task.consumes:
            task.waits += port.arrived == task.acted
        for port in task.produces:
            port.taken += 1
            if port.taken > port.credits:
                raise InternalError(f"{self.queue}: no copy of {port.register} for {task.id}")
            task.waits += port.taken == port.credits
        if not task.waits and not self.in_order:
            heappush(self._ready, (task.acted, task.id))
        self._running = Act(task.id, step)
        actions.append(self._running)

    def _next(self) -> Task | None:
        if not self.in_order:
            return self._by_id[heappop(self._ready)[1]] if self._ready else None
        if not self._tasks:
            return None
        task = self._tasks[self.started % len(self._tasks)]
        return None if task.waits else task

    def _met(self, task: Task) -> None:
        """One of the conditions that `task` waited for holds now."""
        task.waits -= 1
        if not task.waits and not self.in_order:
            heappush(self._ready, (task.acted, task.id))

    def _put(self, port: Port) -> None:
        """A version is there: readers that waited for just this one wait no more for it."""
        version = port.arrived
        port.arrived = version + 1
        if port.readers:
            port.local[version] = len(port.readers)
            for task in port.readers:
                if task.acted == version:
                    self._met(task)

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
        if not port.readers:
            actions.append(Free(port.register, version))
            self._settle(port, version)

    def _release(self, port: Port, version: int, actions: list[Action]) -> None:
        """The last reader of this queue is done with a version."""
        del port.local[version]
        actions.append(Free(port.register, version))
        if port.producer is None:
            actions.append(Send(port.source, Released(port.register, version)))
        else:
            self._settle(port, version)

    def _settle(self, port: Port, version: int) -> None:
        """Give a copy back to its producer once neither this queue nor another one reads it."""
        if version in port.local or port.remote.get(version, 0):
            return
        port.remote.pop(version, None)
        port.taken -= 1
        task = port.producer
        if port.taken < 0 or task is None:
            raise InternalError(f"{self.queue}: {port.register} released more often than made")
        if port.taken == port.credits - 1:
            self._met(task)


def _waiting(task: Task) -> Waiting:
    """What the next act of a task lacks."""
    versions = tuple(port.register for port in task.consumes if port.arrived <= task.acted)
    copies = tuple(port.register for port in task.produces if port.taken >= port.credits)
    return Waiting(task.id, task.acted, versions, copies)
