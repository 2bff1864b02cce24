"""All queues of a rank together: their machines, and a driver of all of them on the calling thread."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol, TypeVar, final

from weft.actors.invariants import check_rank, is_debugging
from weft.actors.machine import QueueMachine
from weft.actors.messages import (
    Act,
    Action,
    Begin,
    EndStep,
    Event,
    Free,
    QueueStatistics,
    Ready,
    Released,
    Send,
    waiting_text,
)
from weft.errors import InternalError
from weft.ir.legal.plans import verify_plan
from weft.ir.plan import COMPUTE, HOST, RankPlan


def machines(plan: RankPlan) -> dict[str, QueueMachine]:
    """One machine for each queue; those of communicators, and those with an order in the plan, keep that of the plan.

    Raises:
        InternalError: when actors and registers of the plan do not fit each other.
    """
    verify_plan(plan)
    ordered = {order.queue for order in plan.orders}
    return {
        queue: QueueMachine(plan, queue, queue in ordered or queue not in (COMPUTE, HOST))
        for queue in plan.on_queue
    }


@final
class RankDriver:
    """Drives all queues of a rank on one thread, for synchronous executors.

    Args:
        plan: of the rank.
        executor: does the work of all queues.
    """

    def __init__(self, plan: RankPlan, executor: Executor) -> None:
        self._plan = plan
        self._debugging = is_debugging()
        self._mail: deque[tuple[str, Ready | Released]] = deque()
        self._drivers = {
            queue: Driver(machine, executor, self) for queue, machine in machines(plan).items()
        }

    def begin(self, step: int) -> None:
        """All queues begin a step; nothing starts."""
        for driver in self._drivers.values():
            driver.receive(Begin(step))

    def run(self, actor: int, micro: int) -> None:
        """Do an act.

        Raises:
            InternalError: when the actor may not act now, not for this micro-batch, or out of turn.
        """
        driver = self._drivers[self._plan.actors[actor].queue]
        try:
            act = driver.machine.start_act(actor, micro)
        except InternalError as error:
            waiting = waiting_text(self._plan, self.statistics())
            raise InternalError(f"rank {self._plan.rank}: {error}:\n{waiting}") from None
        driver.run(act)
        self._deliver()

    def go_on(self) -> bool:
        """Do one act on every queue that has one which may start; False if none has."""
        begun = False
        for driver in self._drivers.values():
            if driver.go_on():
                self._deliver()
                begun = True
        return begun

    def statistics(self) -> tuple[QueueStatistics, ...]:
        """A snapshot of all queues."""
        return tuple(driver.machine.statistics() for driver in self._drivers.values())

    def send(self, queue: str, event: Ready | Released) -> None:
        """Keep an event until the act that sent it is done with."""
        self._mail.append((queue, event))

    def end_step(self, step: int) -> None:
        """Nobody waits for the end of a step."""

    def _deliver(self) -> None:
        while self._mail:
            queue, event = self._mail.popleft()
            self._drivers[queue].receive(event)
        if self._debugging:
            check_rank({name: driver.machine.state() for name, driver in self._drivers.items()})


# The driver of a queue: what its machine says is done, whatever the clock and whatever does the work.
#
# A queue makes three moves: it receives an event, starts an act, ends it. When it makes them is up to
# those that drive it, all of them with the machines of `machine.py`:
#
# driven by                            clock    an act ends
# runtime/executor/queues.py           real     when its work is done, on the thread of the queue
# runtime/executor/device_executor.py  none     when it is launched: an event of its stream stands for its real end


Time = TypeVar("Time", covariant=True)


class Clock(Protocol[Time]):
    """Says what time it is, such as in nanoseconds (int)."""

    def __call__(self) -> Time: ...


class Executor(Protocol):
    """Does the work of a queue."""

    def start(self, act: Act) -> bool:
        """Start an act. True when it has ended on return; otherwise `Driver.end` is called when it has."""

    def free(self, register: str, version: int) -> None:
        """Drop a version that was made here and that no actor of this queue reads."""


class Post(Protocol):
    """Takes what a queue has to say to others."""

    def send(self, queue: str, event: Ready | Released) -> None:
        """Deliver an event to another queue, after all that was sent there before."""

    def end_step(self, step: int) -> None:
        """All actors of the queue have acted for a step."""


@final
class Driver:
    """Drives one machine.

    Args:
        machine: decides when the actors of the queue act.
        executor: what their acts are.
        post: sends messages to other queues.
    """

    __slots__ = ("_executor", "_post", "machine")

    def __init__(self, machine: QueueMachine, executor: Executor, post: Post) -> None:
        self.machine = machine
        self._executor = executor
        self._post = post

    def receive(self, event: Event) -> None:
        """Take an event; it starts nothing."""
        self._do(self.machine.handle(event))

    def next(self) -> Act | None:
        """The act that comes next, which the machine takes for started; None if none may start. `run` it."""
        return self.machine.start()

    def run(self, act: Act) -> None:
        """Do an act, or begin to."""
        if self._executor.start(act):
            self._do(self.machine.finish())

    def go_on(self) -> bool:
        """Start the next act; False if none may start."""
        act = self.machine.start()
        if act is not None:
            self.run(act)
        return act is not None

    def end(self) -> None:
        """The act that runs has ended."""
        self._do(self.machine.finish())

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if type(action) is Send:
                self._post.send(action.queue, action.event)
            elif type(action) is Free:
                self._executor.free(action.register, action.version)
            elif type(action) is EndStep:
                self._post.end_step(action.step)
