"""Machines in tests: one that starts what may act after every event, and a rank whose acts take no time."""

from __future__ import annotations

from dataclasses import dataclass, field

from weft.actors import Act, Action, Event, QueueMachine, RankDriver, waiting_text
from weft.errors import InternalError
from weft.ir.plan import RankPlan


def react(machine: QueueMachine, event: Event) -> tuple[Action | Act, ...]:
    """What a machine says to an event, and the act that it starts then."""
    actions = machine.handle(event)
    act = machine.start()
    return (*actions, act) if act is not None else tuple(actions)


@dataclass
class Instant:
    """An executor whose acts take no time; it notes them."""

    acts: list[Act] = field(default_factory=list)

    def start(self, act: Act) -> bool:
        self.acts.append(act)
        return True

    def free(self, register: str, version: int) -> None:
        pass


def run_plan(plan: RankPlan, steps: int = 2) -> tuple[Act, ...]:
    """The acts of some steps of a plan, all of them in flight at once, as they start."""
    instant = Instant()
    driver = RankDriver(plan, instant)
    for step in range(steps):
        driver.begin(step)
    while driver.go_on():
        pass
    statistics = driver.statistics()
    if not all(queue.idle for queue in statistics):
        raise InternalError(f"the plan is stuck:\n{waiting_text(plan, statistics)}")
    return tuple(instant.acts)
