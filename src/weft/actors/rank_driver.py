"""All queues of a rank together: their machines, and a driver of all of them on the calling thread."""

from __future__ import annotations

from collections import deque
from typing import final

from weft.actors.driver import Driver, Executor
from weft.actors.invariants import check_rank, is_debugging
from weft.actors.machine import QueueMachine
from weft.actors.messages import Begin, Ready, Released
from weft.actors.statistics import QueueStatistics, waiting_text
from weft.errors import InternalError
from weft.ir.legal.plans import verify_plan
from weft.ir.plan import COMPUTE, HOST, RankPlan


def queues_of(plan: RankPlan) -> tuple[str, ...]:
    """The queues that have an actor which acts, in the order of the plan."""
    return tuple(plan.on_queue)


def machines(plan: RankPlan) -> dict[str, QueueMachine]:
    """One machine for each queue; those of communicators, and those with an order in the plan, keep that of the plan.

    Raises:
        InternalError: when actors and registers of the plan do not fit each other.
    """
    verify_plan(plan)
    ordered = {order.queue for order in plan.orders}
    return {
        queue: QueueMachine(plan, queue, queue in ordered or queue not in (COMPUTE, HOST))
        for queue in queues_of(plan)
    }


@final
class RankDriver:
    """Drives all queues of a rank on one thread, for executors whose acts have ended when they return.

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
