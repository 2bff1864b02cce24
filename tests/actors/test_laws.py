"""Laws of plans on a virtual clock: whatever acts take, results, dependencies and fixed orders stay."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache

from hypothesis import assume, given
from hypothesis import strategies as st

from plan_runs import Acts, sequential
from strategies import durations, law, looped_plans, pipeline_plans
from weft.actors import Act, RankDriver
from weft.actors.dependencies import dependencies_in_step
from weft.ir.plan import Communicate, Hold, RankPlan
from weft.simulator.clock import SimulatedStep, Timed, simulate_step


def in_time(timeline: Sequence[Timed]) -> Iterator[tuple[bool, Act]]:
    """Starts (True) and ends (False) of acts; what ends comes before what starts later in the list at that time."""
    running: list[tuple[float, int, Timed]] = []
    for number, timed in enumerate(timeline):
        while running and min(running)[0] <= timed.start:
            running.remove(first := min(running))
            yield False, Act(first[2].actor, 0, first[2].micro)
        yield True, Act(timed.actor, 0, timed.micro)
        running.append((timed.end, number, timed))
    for _, _, timed in sorted(running):
        yield False, Act(timed.actor, 0, timed.micro)


@law(150)
@given(looped_plans(), st.data())
def test_whatever_acts_take_they_compute_what_the_sequential_order_does(
    plan: RankPlan | None, data: st.DataObject
) -> None:
    assume(plan is not None)
    found = simulate_step([plan], {0: data.draw(durations(plan))}, fixed=True)
    acts = Acts(plan)
    for starts, act in in_time(found.timelines[0]):
        (acts.start if starts else acts.finish)(act)
    expected = sequential(plan)
    assert len(acts.done) == sum(actor.acts for actor in plan.actors)
    assert all(acts.done[id, index] == expected(id, index) for id, index in acts.done)


@law(100)
@given(looped_plans(), st.data())
def test_no_act_starts_before_the_end_of_what_it_needs(
    plan: RankPlan | None, data: st.DataObject
) -> None:
    assume(plan is not None)
    found = simulate_step([plan], {0: data.draw(durations(plan))}, fixed=True)
    timed = {(each.actor, each.micro): each for each in found.timelines[0]}
    for act, needs in dependencies_in_step(plan).items():
        assert all(timed[need].end <= timed[act].start for need in needs)


def critical_path(plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[float]]) -> float:
    """Seconds of the longest chain of acts that need each other; communications begin on all ranks at once."""
    needs = {plan.rank: dependencies_in_step(plan) for plan in plans}
    meetings: dict[tuple[int, int], list[tuple[int, int]]] = {}
    by_place: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for plan in plans:
        places: dict[str, int] = {}
        for actor in plan.actors:
            if isinstance(actor, Communicate):
                place = places[actor.queue] = places.get(actor.queue, -1) + 1
                there = by_place.setdefault((actor.queue, place), [])
                there.append((plan.rank, actor.id))
                meetings[plan.rank, actor.id] = there

    @cache
    def end(rank: int, id: int, micro: int) -> float:
        together = meetings.get((rank, id), [(rank, id)])
        before = (end(who, *need) for who, each in together for need in needs[who][each, micro])
        return max(before, default=0.0) + max(seconds[who][each] for who, each in together)

    acts = ((plan.rank, *act) for plan in plans for act in needs[plan.rank])
    return max(end(*act) for act in acts)


def busy(plan: RankPlan, seconds: Sequence[float]) -> float:
    """Seconds that the busiest queue of a rank works."""
    queues: dict[str, float] = {}
    for actor in plan.actors:
        if not isinstance(actor, Hold):
            queues[actor.queue] = queues.get(actor.queue, 0.0) + actor.acts * seconds[actor.id]
    return max(queues.values())


def check_bounds(
    plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[float]], found: SimulatedStep
) -> None:
    assert found.makespan >= critical_path(plans, seconds)
    assert all(found.makespan >= busy(plan, seconds[plan.rank]) for plan in plans)
    ends = (act.end for acts in found.timelines.values() for act in acts)
    assert found.makespan == max(ends)


@law(100)
@given(looped_plans(), st.data())
def test_no_step_is_shorter_than_its_critical_path(
    plan: RankPlan | None, data: st.DataObject
) -> None:
    assume(plan is not None)
    seconds = {0: data.draw(durations(plan))}
    check_bounds([plan], seconds, simulate_step([plan], seconds, fixed=True))


@law(60)
@given(pipeline_plans(), st.data())
def test_orders_found_with_some_durations_are_kept_with_any(
    plans: tuple[RankPlan, ...], data: st.DataObject
) -> None:
    first, second = ({p.rank: data.draw(durations(p)) for p in plans} for _ in range(2))
    found = simulate_step(plans, first)
    check_bounds(plans, first, found)
    ordered = [replace(plan, orders=found.orders[plan.rank]) for plan in plans]
    again = simulate_step(ordered, second, fixed=True)
    check_bounds(ordered, second, again)
    for plan in ordered:
        for order in plan.orders:
            acts = [
                (act.actor, act.micro)
                for act in again.timelines[plan.rank]
                if plan.actors[act.actor].queue == order.queue
            ]
            assert tuple(acts) == order.acts


class Launched:
    """An executor whose acts have ended when they are launched."""

    def __init__(self, plan: RankPlan) -> None:
        self.acts = Acts(plan)

    def start(self, act: Act) -> bool:
        self.acts.start(act)
        self.acts.finish(act)
        return True

    def free(self, register: str, version: int) -> None:
        pass


@law(100)
@given(looped_plans(), st.data())
def test_what_was_simulated_may_be_launched_in_that_order(
    plan: RankPlan | None, data: st.DataObject
) -> None:
    """As a device with streams does (`weft.runtime.executor.device_executor`), step after step."""
    assume(plan is not None)
    timeline = simulate_step([plan], {0: data.draw(durations(plan))}, fixed=True).timelines[0]
    launched = Launched(plan)
    driver = RankDriver(plan, launched)
    for step in range(3):
        driver.begin(step)
        for act in timeline:
            driver.run(act.actor, act.micro)
    assert all(queue.idle for queue in driver.statistics())
    expected = sequential(plan)
    assert len(launched.acts.done) == 3 * len(timeline)
    assert all(found == expected(*act) for act, found in launched.acts.done.items())
