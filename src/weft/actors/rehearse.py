"""All queues of a rank together: their machines, and a rehearsal of the plan in which every act takes no time."""

from __future__ import annotations

from collections import deque

from weft.actors.machine import QueueMachine
from weft.actors.messages import Act, Action, Begin, Event, Finished, Send
from weft.actors.statistics import waiting_text
from weft.errors import InternalError
from weft.ir.plan import COMPUTE, HOST, RankPlan
from weft.ir.verify_plan import verify_plan


def queues_of(plan: RankPlan) -> tuple[str, ...]:
    """The queues that have an actor which acts, in the order of the plan."""
    return tuple(plan.on_queue)


def machines(plan: RankPlan, told: bool = False) -> dict[str, QueueMachine]:
    """One machine for each queue; those of communicators keep the order that the plan gives.

    Args:
        plan: the plan of the rank.
        told: whether those of communicators act only on `Start`, in any order (see `QueueMachine`).

    Raises:
        InternalError: when actors and registers of the plan do not fit each other.
    """
    verify_plan(plan)
    found = {}
    for queue in queues_of(plan):
        ordered = queue not in (COMPUTE, HOST)
        found[queue] = QueueMachine(plan, queue, ordered and not told, ordered and told)
    return found


def rehearse(plan: RankPlan, steps: int = 2) -> tuple[Act, ...]:
    """Run `steps` steps of the plan without doing the work, all of them in flight at once.

    Returns:
        The acts in the order in which they were started; the same for every run.

    Raises:
        InternalError: when the plan gets stuck; the message says what each actor waits for.
    """
    every = machines(plan)
    mail: deque[tuple[str, Event]] = deque(
        (queue, Begin(step)) for step in range(steps) for queue in every
    )
    acts: list[Act] = []
    while mail:
        queue, event = mail.popleft()
        for action in every[queue].handle(event):
            _deliver(queue, action, mail, acts)
    statistics = [machine.statistics() for machine in every.values()]
    if not all(queue.idle for queue in statistics):
        raise InternalError(f"the plan is stuck:\n{waiting_text(plan, statistics)}")
    return tuple(acts)


def _deliver(queue: str, action: Action, mail: deque[tuple[str, Event]], acts: list[Act]) -> None:
    if isinstance(action, Act):
        acts.append(action)
        mail.append((queue, Finished(*action)))
    elif isinstance(action, Send):
        mail.append((action.queue, action.event))
