"""Laws of threads: plans that are drawn compute on them what the virtual clock says, in the orders that plans fix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from threading import Lock

import pytest
import torch
from hypothesis import assume, given
from torch import Tensor

from plan_runs import Acts, sequential
from simulator.steps import tasks_of
from strategies import law, looped_plans
from weft.actors import Act
from weft.ir.plan import Actor, RankPlan
from weft.runtime.executor import rank_executor
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.executor.work import Rank, Work
from weft.runtime.recording import Record
from weft.simulator.clock import run, simulate_step
from weft.simulator.tasks import Tasks, to_ticks

pytestmark = pytest.mark.timeout(60)


class SharedActs:
    """What the acts of a plan compute, whichever threads they run on."""

    def __init__(self, plan: RankPlan) -> None:
        self.acts = Acts(plan)
        self._lock = Lock()

    def bind(self, actor: Actor, rank: Rank) -> Work:
        """The work of an actor, which passes no tensors on."""

        def act(step: int, micro: int, inputs: list[Tensor]) -> Sequence[Tensor]:
            with self._lock:
                self.acts.start(Act(actor.id, step, micro))
            # Here others may see that the copies are being written.
            with self._lock:
                self.acts.finish(Act(actor.id, step, micro))
            return ()

        return Work((), (), act, actor.acts)


def run_on_threads(plan: RankPlan, steps: int) -> tuple[SharedActs, list[Mapping[str, list[Act]]]]:
    """What all acts compute on a thread for each queue, and the acts of each queue in each step, in order."""
    shared, records = recorded(plan, steps)
    orders: list[Mapping[str, list[Act]]] = []
    for record in records:
        ran: dict[str, list[Act]] = {}
        for act, _, _ in record.spans:
            ran.setdefault(plan.actors[act.actor].queue, []).append(act)
        orders.append(ran)
    return shared, orders


def recorded(plan: RankPlan, steps: int) -> tuple[SharedActs, list[Record]]:
    """What all acts compute, and when they did."""
    shared = SharedActs(plan)
    records: list[Record] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank_executor, "bind_work", shared.bind)
        with ThreadExecutor(Rank(plan, torch.device("cpu"), {}, {}), timeout=20) as executor:
            for _ in range(steps):
                executor.step({})
                records.append(executor.recorder.record())
    return shared, records


@law(40)
@given(looped_plans())
def test_threads_compute_what_the_sequential_order_does(plan: RankPlan | None) -> None:
    assume(plan is not None)
    shared, orders = run_on_threads(plan, 3)
    expected = sequential(plan)
    acts = sum(actor.acts for actor in plan.actors)
    assert len(shared.acts.done) == 3 * acts
    assert all(found == expected(*act) for act, found in shared.acts.done.items())
    assert [sum(map(len, ran.values())) for ran in orders] == [acts] * 3


@law(40)
@given(looped_plans())
def test_virtual_and_real_orders_of_a_queue_are_those_that_the_plan_fixes(
    plan: RankPlan | None,
) -> None:
    assume(plan is not None)
    timeline = simulate_step([plan], {0: [1.0] * len(plan.actors)}, fixed=True).timelines[0]
    _, orders = run_on_threads(plan, 2)
    for order in plan.orders:
        own = [act for act in timeline if plan.actors[act.actor].queue == order.queue]
        assert tuple((act.actor, act.micro) for act in own) == order.acts
        for step, ran in enumerate(orders):
            assert ran[order.queue] == [Act(actor, step, micro) for actor, micro in order.acts]


@law(40)
@given(looped_plans())
def test_virtual_order_is_the_real_one_where_durations_are_those_measured(
    plan: RankPlan | None,
) -> None:
    """The time that a queue needs to go on counts to the act that it goes on with, so that both take the same time.

    Meanwhile something that goes first may have become ready, or what was ready alone have been passed
    over: the clock cannot know, and such runs are left out.
    """
    assume(plan is not None)
    record = recorded(plan, 1)[1][0]
    begin = record.steps[0].begin
    tasks = tasks_of([plan], {0: [1.0] * len(plan.actors)})
    number = {one: task for task, members in enumerate(tasks.members) for one in members}
    ends, order = [0.0] * len(tasks), []
    for act, _, end in sorted(record.spans, key=lambda span: span[1:]):
        task = number[0, act.actor, 0, act.micro]
        order.append(task)
        ends[task] = to_ticks((end - begin) * 1e-9)
    before = decided(tasks, order, ends)
    if before is None:
        return
    lasts = [ends[task] - before[task] for task in range(len(tasks))]
    times = run(replace(tasks, seconds=tuple(lasts)))
    assert list(times.ends) == ends
    for lane in range(len(tasks.lanes)):
        own = [task for task in order if tasks.lane[task] == lane]
        assert own == [task for task in times.order if tasks.lane[task] == lane]


def decided(tasks: Tasks, order: list[int], ends: list[float]) -> dict[int, float] | None:
    """When each task could begin; None where a queue took another one than the first of those that could then."""
    ready = {task: max((ends[need] for need in tasks.needs[task]), default=0.0) for task in order}
    found = dict(ready)
    for lane in range(len(tasks.lanes)):
        free, left = 0.0, [task for task in order if tasks.lane[task] == lane]
        while left:
            time = max(free, min(ready[task] for task in left))
            first = min(task for task in left if ready[task] <= time)
            if first != left.pop(0):
                return None
            found[first], free = time, ends[first]
    return found
