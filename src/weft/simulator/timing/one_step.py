"""One step of all ranks: when each act runs, and in which order communicators run theirs.

Without orders, communicators take what is ready on all their ranks, by priority and micro-batch: the order that comes
out is the one to fix. With the orders fixed, a step that ends proves that no run can hang, whatever the real durations
are: with credits and orders the plans are a marked graph, in which what may act stays so until it acts (Commoner, Holt,
Even and Pnueli, "Marked directed graphs", 1971), and a compute queue only delays what may act.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, final

from weft.actors.deadlock import deadlock_text
from weft.errors import InternalError
from weft.ir.plan import Order, RankPlan
from weft.simulator.timing.clock import run
from weft.simulator.timing.tasks import meets, repeated, step_tasks
from weft.units import Seconds


@final
class Timed(NamedTuple):
    """One act of a simulation, in seconds from the beginning of the step."""

    actor: int
    micro: int
    start: Seconds
    end: Seconds


@final
@dataclass(frozen=True)
class SimulatedStep:
    """The results of a simulation.

    Attributes:
        makespan: seconds of the step.
        timelines: for each rank, its acts in the order in which they started.
        orders: for each rank, the order of the acts of its communicators.
    """

    makespan: Seconds
    timelines: Mapping[int, tuple[Timed, ...]]
    orders: Mapping[int, tuple[Order, ...]]


def simulate_step(
    plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[Seconds]], *, fixed: bool = False
) -> SimulatedStep:
    """Run one step of all plans on the clock. Equal arguments give equal results.

    Args:
        plans: of all ranks that share a communicator.
        seconds: for each rank, how long an act of each of its actors takes.
        fixed: true where communicators keep the orders of the plans.

    Raises:
        InternalError: when the step gets stuck; the message names the acts that wait for each
            other.
    """
    tasks = repeated(step_tasks(plans, seconds, ordered=fixed), 1)
    times = run(tasks, stuck=True)
    if len(times.order) < len(tasks):
        ended = (member for task in times.order for member in tasks.members[task])
        raise InternalError(deadlock_text(plans, {(r, a, m) for r, a, _, m in ended}, fixed))
    lines: dict[int, list[Timed]] = {plan.rank: [] for plan in plans}
    acts = {(plan.rank, q): list[tuple[int, int]]() for plan in plans for q in plan.on_queue}
    for task in times.begun:
        start, end, queue = (
            times.starts[task],
            times.ends[task],
            tasks.lanes[tasks.lane[task]].queue,
        )
        for rank, actor, _, micro in tasks.members[task]:
            lines[rank].append(Timed(actor, micro, start, end))
            acts[rank, queue].append((actor, micro))
    orders = {
        plan.rank: tuple(Order(q, tuple(acts[plan.rank, q])) for q in plan.on_queue if meets(q))
        for plan in plans
    }
    timelines = {rank: tuple(own) for rank, own in lines.items()}
    return SimulatedStep(times.makespan, timelines, {} if fixed else orders)
