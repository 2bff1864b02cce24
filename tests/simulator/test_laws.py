"""Laws of simulated steps: never shorter than their critical path, never longer for more copies in a fixed order."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from simulator.steps import tasks_of
from strategies import durations, law, looped_plans, pipeline_plans
from weft.ir.plan import RankPlan
from weft.simulator.clock import run, simulate_step
from weft.simulator.facts import critical_path, propagate
from weft.simulator.tasks import Tasks, to_ticks

STEPS = 3


def longest_chain(tasks: Tasks) -> float:
    """Seconds of the longest chain of tasks of which each waits for the one before."""
    ends: list[float] = []
    for task in run(tasks).order:
        ends += [0.0] * (task + 1 - len(ends))
        ends[task] = max((ends[need] for need in tasks.needs[task]), default=0.0)
        ends[task] += tasks.seconds[task]
    return max(ends, default=0.0)


@law(40)
@given(looped_plans(), st.data())
def test_steps_are_not_shorter_than_their_longest_chain(
    plan: RankPlan | None, data: st.DataObject
) -> None:
    assume(plan is not None)
    tasks = tasks_of([plan], {0: data.draw(durations(plan))}, STEPS)
    times = run(tasks)
    assert times.makespan >= longest_chain(tasks)
    for lane in range(len(tasks.lanes)):
        own = (task for task in range(len(tasks)) if tasks.lane[task] == lane)
        assert times.makespan >= sum(tasks.seconds[task] for task in own)


@law(40)
@given(looped_plans(), st.data())
def test_the_critical_path_fills_the_time_until_a_step_ends(
    plan: RankPlan | None, data: st.DataObject
) -> None:
    assume(plan is not None)
    tasks = tasks_of([plan], {0: data.draw(durations(plan))}, STEPS)
    times = run(tasks)
    for step in range(STEPS):
        path = critical_path(tasks, times, step)
        own = [task for task in range(len(tasks)) if tasks.members[task]]
        last = max((times.ends[task] for task in own if tasks.step_of(task) == step), default=0.0)
        if not path:
            continue
        assert times.ends[path[-1]] == last
        for before, task in pairwise(path):
            assert times.ends[before] == times.starts[task]
        if step == 0:
            assert times.starts[path[0]] == 0.0


@law(40)
@given(looped_plans(), st.data())
def test_more_copies_are_never_slower_in_a_fixed_order(
    plan: RankPlan | None, data: st.DataObject
) -> None:
    assume(plan is not None)
    assert plan is not None
    seconds = {0: data.draw(durations(plan))}
    more = data.draw(
        st.lists(st.integers(0, 2), min_size=len(plan.registers), max_size=len(plan.registers))
    )
    registers = tuple(
        replace(register, credits=register.credits + extra)
        for register, extra in zip(plan.registers, more, strict=True)
    )
    tasks = tasks_of([plan], seconds, STEPS)
    freer = tasks_of([replace(plan, registers=registers)], seconds, STEPS)
    order = run(tasks).order
    lasts = np.asarray(tasks.seconds)[:, None]
    assert tasks.members == freer.members
    assert np.all(propagate(freer, order, lasts) <= propagate(tasks, order, lasts))


@law(30)
@given(looped_plans(), st.data())
def test_many_sets_of_durations_at_once_are_one_after_the_other(
    plan: RankPlan | None, data: st.DataObject
) -> None:
    assume(plan is not None)
    tasks = tasks_of([plan], {0: data.draw(durations(plan))}, 2)
    times = run(tasks)
    lasts = np.asarray(tasks.seconds)[:, None] * np.asarray([1.0, 2.0])
    ends = propagate(tasks, times.order, lasts)
    assert ends[:, 0].tolist() == list(times.ends)
    assert ends[:, 1].tolist() == [2 * end for end in times.ends]


@law(15)
@given(pipeline_plans(), st.data())
def test_acts_that_last_as_long_as_they_did_run_in_the_order_in_which_they_did(
    plans: tuple[RankPlan, ...], data: st.DataObject
) -> None:
    """The machines of the runtime on a clock stand for a run: durations are read off its timeline."""
    orders = simulate_step(plans, {p.rank: data.draw(durations(p)) for p in plans}).orders
    fixed = [replace(plan, orders=orders[plan.rank]) for plan in plans]
    ran = simulate_step(fixed, {p.rank: data.draw(durations(p)) for p in plans}, fixed=True)
    measured = {
        plan.rank: [
            to_ticks(
                next((e.end - e.start for e in ran.timelines[plan.rank] if e.actor == a.id), 0.0)
            )
            for a in plan.actors
        ]
        for plan in plans
    }
    tasks = tasks_of(fixed, measured)
    times = run(tasks)
    for plan in fixed:
        for queue, own in plan.on_queue.items():
            ids = {actor.id for actor in own}
            real = [(e.actor, e.micro) for e in ran.timelines[plan.rank] if e.actor in ids]
            number = {one: task for task, members in enumerate(tasks.members) for one in members}
            there = [number[plan.rank, actor, 0, micro] for actor, micro in real]
            starts = [times.starts[task] for task in there]
            assert starts == sorted(starts), queue
