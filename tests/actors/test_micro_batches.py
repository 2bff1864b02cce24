"""Actors that act for each micro-batch: rates, credits, priorities, control registers, orders."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from build import value
from plan_runs import Acts, react, ready, run_plan, sequential
from strategies import MICRO_BATCHES, law, looped_plans, over_step
from weft.actors import (
    Act,
    Begin,
    EndStep,
    Finished,
    Free,
    QueueMachine,
    Ready,
    Released,
    Send,
    machines,
    root_cause,
)
from weft.errors import InternalError
from weft.ir.plan import (
    Compute,
    Feed,
    Fetch,
    LocalValue,
    Order,
    RankPlan,
    Register,
)

M = MICRO_BATCHES


def control(name):
    return LocalValue(name, (0,), "bool")


def loop(id, reads, writes, queue="compute", priority=0, once=()):
    return Compute(id, over_step(*once), reads, writes, queue, M, priority)


def once(name, producer, consumers, credits=1, **options):
    return Register(value(name), "activation", producer, consumers, credits, **options)


def each(name, producer, consumers, credits=1, **options):
    return once(name, producer, consumers, credits, rate=M, **options)


def acts_of(machine, *events):
    """The acts that follow when each act ends at once."""
    mail, acts = list(events), []
    while mail:
        for action in react(machine, mail.pop(0)):
            if isinstance(action, Act):
                acts.append(action)
                mail.append(Finished(*action))
    return acts


def accumulation():
    """Feed 0 -> x (whole) -> loop 1 -> y (each) -> loop 2 -> total (once) -> Fetch 3."""
    return RankPlan(
        0,
        (),
        (
            Feed(0, ("x",), ("x",)),
            loop(1, ("x",), ("y",)),
            loop(2, ("y",), ("total",), once=("total",)),
            Fetch(3, ("total",), ("total",)),
        ),
        (once("x", 0, (1,)), each("y", 1, (2,)), once("total", 2, (3,))),
        M,
    )


def test_a_version_of_the_step_is_held_by_all_acts_and_made_by_all():
    machine = QueueMachine(accumulation(), "compute")
    assert react(machine, Begin(0)) == ()
    assert react(machine, Ready("x", 0)) == (Act(1, 0, 0),)
    log = []
    act = Act(1, 0, 0)
    while act:
        actions = react(machine, Finished(*act))
        act = next((action for action in actions if isinstance(action, Act)), None)
        log.append(actions)
    # y goes from act to act; x is given back after the last reader, total given on after the last act.
    assert [act for actions in log for act in actions if isinstance(act, Act)] == [
        Act(2, 0, 0), Act(1, 0, 1), Act(2, 0, 1), Act(1, 0, 2), Act(2, 0, 2),
    ]  # fmt: skip
    assert log[3] == (Act(1, 0, 2),)
    assert log[4] == (Send("host", Released("x", 0)), Act(2, 0, 2))
    assert log[5] == (Send("host", Ready("total", 0)), Free("total", 0), EndStep(0))


def test_the_copy_of_a_total_is_taken_by_the_first_act_and_only_there():
    """Step 1's total needs the copy that step 0's reader still has; the last acts of step 0 do not."""
    machine = QueueMachine(accumulation(), "compute")
    acts = acts_of(machine, Begin(0), Begin(1), Ready("x", 0), Ready("x", 1))
    assert acts[-1] == Act(1, 1, 0)
    assert [w.copies for w in machine.statistics().waiting] == [("y",), ("total",)]
    assert [(w.step, w.micro) for w in machine.statistics().waiting] == [(1, 1), (1, 0)]
    assert acts_of(machine, Released("total", 0))[0] == Act(2, 1, 0)
    assert machine.statistics().idle


@pytest.mark.parametrize("credits", range(1, M + 1))
def test_credits_say_how_far_a_producer_runs_ahead(credits):
    plan = RankPlan(
        0,
        (),
        (loop(0, (), ("y",)), loop(1, ("y",), (), "host")),
        (each("y", 0, (1,), credits),),
        M,
    )
    machine = QueueMachine(plan, "compute")
    assert acts_of(machine, Begin(0)) == [Act(0, 0, micro) for micro in range(credits)]
    for version in range(M - credits):
        assert acts_of(machine, Released("y", version)) == [Act(0, 0, credits + version)]
    assert acts_of(machine, Begin(1)) == []
    assert acts_of(machine, Released("y", M - credits)) == [Act(0, 1, 0)]


@pytest.mark.parametrize(
    ("priorities", "order"),
    [
        ((0, 1), ["F0", "F1", "F2", "B0", "B1", "B2"]),
        ((1, 0), ["F0", "B0", "F1", "B1", "F2", "B2"]),
        ((0, 0), ["F0", "B0", "F1", "B1", "F2", "B2"]),
    ],
)
def test_priority_decides_before_the_micro_batch(priorities, order):
    forward, backward = priorities
    plan = RankPlan(
        0,
        (),
        (loop(0, (), ("y",), priority=forward), loop(1, ("y",), (), priority=backward)),
        (each("y", 0, (1,), M),),
        M,
    )
    names = {0: "F", 1: "B"}
    assert [f"{names[act.actor]}{act.micro}" for act in run_plan(plan, 1)] == order


def test_an_earlier_step_goes_before_a_better_priority():
    plan = RankPlan(
        0,
        (),
        (loop(0, (), (), priority=0), loop(1, (), (), priority=1)),
        (),
        M,
    )
    assert [act.step for act in run_plan(plan, 2)] == [0] * 2 * M + [1] * 2 * M


def prefetch(ahead):
    """Gather 0 runs at most `ahead` micro-batches before its use 1, by a control register full at the start."""
    return RankPlan(
        0,
        (),
        (loop(0, ("go",), ("w",), "comm:0"), loop(1, ("w",), ("go",))),
        (
            each("w", 0, (1,), M),
            Register(control("go"), "control", 1, (0,), ahead, True, M),
        ),
        M,
        (Order("comm:0", tuple((0, micro) for micro in range(M))),),
    )


def test_a_control_register_that_is_full_lets_one_act_go_ahead():
    machine = QueueMachine(prefetch(1), "comm:0", in_order=True)
    assert acts_of(machine, Begin(0)) == [Act(0, 0, 0)]
    assert acts_of(machine, Ready("go", 1)) == [Act(0, 0, 1)]
    assert [(act.actor, act.micro) for act in run_plan(prefetch(1), 1)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2),
    ]  # fmt: skip


def two_loops(order):
    """Two actors of comm:0 that nothing else holds back."""
    actors = (loop(0, (), (), "comm:0"), loop(1, (), (), "comm:0"))
    return RankPlan(0, (), actors, (), M, (Order("comm:0", order),) if order else ())


def test_a_queue_keeps_its_order_step_after_step():
    order = ((1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2))
    acts = run_plan(two_loops(order), 2)
    assert acts == tuple(Act(id, step, micro) for step in range(2) for id, micro in order)


def test_micro_batches_without_an_order_are_refused():
    with pytest.raises(InternalError, match="no order is given for the micro-batches of comm:0"):
        machines(two_loops(()))


def test_events_start_nothing_and_an_act_may_be_named():
    machine = QueueMachine(two_loops(()), "comm:0")
    assert ready(machine) == ()
    assert machine.handle(Begin(0)) == []
    assert ready(machine) == (Act(0, 0, 0), Act(1, 0, 0))
    assert machine.start_act(1, 0) == Act(1, 0, 0)
    assert ready(machine) == ()
    assert machine.start() is None
    with pytest.raises(InternalError, match="may not act now"):
        machine.start_act(0, 0)
    assert machine.handle(Finished(1, 0, 0)) == []
    assert ready(machine) == (Act(0, 0, 0), Act(1, 0, 1))
    with pytest.raises(InternalError, match="may not act now for micro-batch 1"):
        machine.start_act(0, 1)
    assert machine.start() == Act(0, 0, 0)


def test_what_may_not_act_cannot_be_started():
    plan = RankPlan(0, (), (loop(0, ("x",), ()), Feed(1, ("x",), ("x",))), (once("x", 1, (0,)),), M)
    machine = QueueMachine(plan, "compute")
    machine.handle(Begin(0))
    with pytest.raises(InternalError, match="may not act now"):
        machine.start_act(0, 0)


def test_a_queue_in_order_lets_nobody_act_out_of_turn():
    order = ((1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2))
    machine = machines(two_loops(order))["comm:0"]
    machine.handle(Begin(0))
    with pytest.raises(InternalError, match="comm:0: it is not the turn of actor 0"):
        machine.start_act(0, 0)
    assert machine.start_act(1, 0) == Act(1, 0, 0)


def test_finishing_another_micro_batch_is_an_error():
    machine = QueueMachine(two_loops(()), "comm:0")
    assert react(machine, Begin(0)) == (Act(0, 0, 0),)
    with pytest.raises(InternalError, match="while Act"):
        react(machine, Finished(0, 0, 1))


def test_a_barrier_in_the_loop_needs_a_credit_for_each_micro_batch():
    """The total of all micro-batches is read beside each of them: too few credits are a circle of two actors."""

    def plan(credits):
        return RankPlan(
            0,
            (),
            (loop(0, (), ("x", "total"), once=("total",)), loop(1, ("x", "total"), ())),
            (each("x", 0, (1,), credits), once("total", 0, (1,))),
            M,
        )

    assert len(run_plan(plan(M), 2)) == 4 * M
    with pytest.raises(InternalError, match="waits in step 0, micro-batch 2 for a free copy of x"):
        run_plan(plan(M - 1), 1)
    machine = QueueMachine(plan(M - 1), "compute")
    acts_of(machine, Begin(0))
    assert root_cause(plan(M - 1), [machine.statistics()]) == (0, 1)


def test_the_blame_is_with_who_runs_and_with_whose_turn_it_is():
    plan = replace(
        two_loops(((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))),
        actors=(loop(0, (), ("a",), "comm:0"), loop(1, (), (), "comm:0"), loop(2, ("a",), ())),
        registers=(each("a", 0, (2,)),),
    )
    every = machines(plan)
    for machine in every.values():
        react(machine, Begin(0))
    assert root_cause(plan, [machine.statistics() for machine in every.values()]) == (0,)
    assert root_cause(plan, []) == ()
    stuck = replace(plan, registers=(replace(plan.registers[0], consumers=(1, 2)),), actors=(
        plan.actors[0], loop(1, ("a",), (), "comm:0"), plan.actors[2]))  # fmt: skip
    stuck = replace(
        stuck, orders=(Order("comm:0", ((1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2))),)
    )
    every = machines(stuck)
    for machine in every.values():
        react(machine, Begin(0))
    # 1 waits for what 0 makes, and 0 for the turn that 1 has.
    assert root_cause(stuck, [machine.statistics() for machine in every.values()]) == (0, 1)


def run_randomly(plan, steps, seed):
    """Run with messages and ends of acts in random order; checks credits, and returns what each act computed."""
    chance = random.Random(seed)
    every, acts, ended = machines(plan), Acts(plan), []
    mail: Any = {(a, b): [] for a in (*every, "begin") for b in every}
    for queue in every:
        mail["begin", queue] = [Begin(step) for step in range(steps)]
    while any(mail.values()):
        source, target = chance.choice(sorted(key for key, letters in mail.items() if letters))
        event = mail[source, target].pop(0)
        if isinstance(event, Finished):
            acts.finish(event)
        for action in react(every[target], event):
            match action:
                case Act():
                    acts.start(action)
                    mail[target, target].append(Finished(*action))
                case Send():
                    mail[target, action.queue].append(action.event)
                case EndStep(step=step):
                    ended.append(step)
        check_credits(plan, acts.done)
    assert all(machine.statistics().idle for machine in every.values())
    assert sorted(ended) == sorted(list(range(steps)) * len(every))
    return acts.done


def check_credits(plan, done):
    """Versions started and not yet read by every reader's last act are at most as many as there are credits."""
    started = {actor.id: 0 for actor in plan.actors}
    for id, _ in done:
        started[id] += 1
    for register in plan.registers:
        if not register.consumers:
            continue
        per = plan.actors[register.producer].acts // register.rate
        made = -(-started[register.producer] // per) + register.full
        # A reader that has started its last act of a version may be done with it.
        read = min(started[id] * register.rate // plan.actors[id].acts for id in register.consumers)
        assert made - read <= register.credits


@law(150)
@given(looped_plans(), st.integers(0, 99))
def test_any_timing_computes_what_the_sequential_order_does(plan, seed):
    if plan is None:
        return
    done = run_randomly(plan, 2, seed)
    act = sequential(plan)
    assert len(done) == 2 * sum(actor.acts for actor in plan.actors)
    assert all(done[id, index] == act(id, index) for id, index in done)
    assert len(run_plan(plan, 2)) == len(done)


@law(100)
@given(looped_plans(enough_slots=True))
def test_a_credit_for_each_micro_batch_is_always_enough(plan):
    assert plan is not None
    run_plan(plan, 3)
