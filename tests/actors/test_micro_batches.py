"""Actors that act for each micro-batch: rates, credits, priorities, control registers, orders."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from build import value
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
    Start,
    blame,
    machines,
    rehearse,
)
from weft.errors import InternalError
from weft.ir.plan import (
    Compute,
    Feed,
    Fetch,
    LocalCall,
    LocalValue,
    Order,
    RankPlan,
    Register,
)

M = 3


def control(name):
    return LocalValue(name, (0,), "bool")


def over_step(*names):
    """Calls that make values over a step, so that a plan is legal."""
    return tuple(LocalCall("weft.accumulate", (1,), (), (value(name),)) for name in names)


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
        for action in machine.handle(mail.pop(0)):
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
    assert machine.handle(Begin(0)) == ()
    assert machine.handle(Ready("x", 0)) == (Act(1, 0, 0),)
    log = []
    act = Act(1, 0, 0)
    while act:
        actions = machine.handle(Finished(*act))
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
    assert [f"{names[act.actor]}{act.micro}" for act in rehearse(plan, 1)] == order


def test_an_earlier_step_goes_before_a_better_priority():
    plan = RankPlan(
        0,
        (),
        (loop(0, (), (), priority=0), loop(1, (), (), priority=1)),
        (),
        M,
    )
    assert [act.step for act in rehearse(plan, 2)] == [0] * 2 * M + [1] * 2 * M


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
    assert [(act.actor, act.micro) for act in rehearse(prefetch(1), 1)] == [
        (0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2),
    ]  # fmt: skip


def two_loops(order):
    """Two actors of comm:0 that nothing else holds back."""
    actors = (loop(0, (), (), "comm:0"), loop(1, (), (), "comm:0"))
    return RankPlan(0, (), actors, (), M, (Order("comm:0", order),) if order else ())


def test_a_queue_keeps_its_order_step_after_step():
    order = ((1, 0), (1, 1), (0, 0), (1, 2), (0, 1), (0, 2))
    acts = rehearse(two_loops(order), 2)
    assert acts == tuple(Act(id, step, micro) for step in range(2) for id, micro in order)


def test_micro_batches_without_an_order_are_refused():
    with pytest.raises(InternalError, match="no order is given for the micro-batches of comm:0"):
        machines(two_loops(()))


def test_a_queue_that_is_told_does_nothing_by_itself():
    machine = machines(two_loops(()), told=True)["comm:0"]
    assert machine.ready() == ()
    assert machine.first() is None
    assert machine.handle(Begin(0)) == ()
    assert machine.ready() == (Act(0, 0, 0), Act(1, 0, 0))
    assert machine.handle(Start(1)) == (Act(1, 0, 0),)
    assert machine.ready() == ()
    assert machine.first() is None
    with pytest.raises(InternalError, match="may not act now"):
        machine.handle(Start(0))
    assert machine.handle(Finished(1, 0, 0)) == ()
    assert machine.ready() == (Act(0, 0, 0), Act(1, 0, 1))
    assert machine.first() == Act(0, 0, 0)


def test_a_queue_that_chooses_is_not_told():
    plan = RankPlan(0, (), (loop(0, ("x",), ()), Feed(1, ("x",), ("x",))), (once("x", 1, (0,)),), M)
    machine = QueueMachine(plan, "compute")
    machine.handle(Begin(0))
    with pytest.raises(InternalError, match="may not act now"):
        machine.handle(Start(0))


def test_finishing_another_micro_batch_is_an_error():
    machine = QueueMachine(two_loops(()), "comm:0")
    assert machine.handle(Begin(0)) == (Act(0, 0, 0),)
    with pytest.raises(InternalError, match="while Act"):
        machine.handle(Finished(0, 0, 1))


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

    assert len(rehearse(plan(M), 2)) == 4 * M
    with pytest.raises(InternalError, match="waits in step 0, micro-batch 2 for a free copy of x"):
        rehearse(plan(M - 1), 1)
    machine = QueueMachine(plan(M - 1), "compute")
    acts_of(machine, Begin(0))
    assert blame(plan(M - 1), [machine.statistics()]) == (0, 1)


def test_the_blame_is_with_who_runs_and_with_whose_turn_it_is():
    plan = replace(
        two_loops(((0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2))),
        actors=(loop(0, (), ("a",), "comm:0"), loop(1, (), (), "comm:0"), loop(2, ("a",), ())),
        registers=(each("a", 0, (2,)),),
    )
    every = machines(plan)
    for machine in every.values():
        machine.handle(Begin(0))
    assert blame(plan, [machine.statistics() for machine in every.values()]) == (0,)
    assert blame(plan, []) == ()
    stuck = replace(plan, registers=(replace(plan.registers[0], consumers=(1, 2)),), actors=(
        plan.actors[0], loop(1, ("a",), (), "comm:0"), plan.actors[2]))  # fmt: skip
    stuck = replace(
        stuck, orders=(Order("comm:0", ((1, 0), (0, 0), (1, 1), (0, 1), (1, 2), (0, 2))),)
    )
    every = machines(stuck)
    for machine in every.values():
        machine.handle(Begin(0))
    # 1 waits for what 0 makes, and 0 for the turn that 1 has.
    assert blame(stuck, [machine.statistics() for machine in every.values()]) == (0, 1)


QUEUES = ("compute", "host", "comm:0", "comm:1")


@st.composite
def pipelines(draw, enough=False):
    """Random actors, some in the loop; edges lead to higher ids, or back from the version before (full)."""
    count = draw(st.integers(2, 7))
    loops = [draw(st.booleans()) for _ in range(count)]
    names, registers = [], []
    for index in range(draw(st.integers(1, 9))):
        producer = draw(st.integers(0, count - 1))
        full = draw(st.booleans())
        others = [id for id in range(count) if id != producer and (full or id > producer)]
        consumers = draw(st.sets(st.sampled_from(others), max_size=3)) if others else set()
        looped = loops[producer] and all(loops[id] for id in consumers)
        rate = M if looped and draw(st.booleans()) and not (full and enough) else 1
        credits = M if enough else draw(st.integers(1, M))
        names.append(f"r{index}")
        consumed = tuple(sorted(consumers))
        registers.append(once(names[-1], producer, consumed, credits, full=full, rate=rate))
    actors = []
    for id in range(count):
        reads = tuple(r.value.name for r in registers if id in r.consumers)
        writes = tuple(r.value.name for r in registers if id == r.producer)
        sums = tuple(r.value.name for r in registers if id == r.producer and r.rate == 1)
        acts = M if loops[id] else 1
        nodes = over_step(*sums) if loops[id] else ()
        queue, priority = draw(st.sampled_from(QUEUES)), draw(st.integers(0, 2))
        actors.append(Compute(id, nodes, reads, writes, queue, acts, priority))
    return ordered(RankPlan(0, (), tuple(actors), tuple(registers), M))


def ordered(plan):
    """The plan with orders for its communicators, as a run without them finds them; None if it is stuck."""
    every = machines(plan, told=True)
    mail = [(queue, Begin(0)) for queue in every]
    found = {queue: [] for queue in every}
    while mail or any(machine.told and machine.ready() for machine in every.values()):
        if not mail:
            queue = next(
                queue for queue, machine in every.items() if machine.told and machine.ready()
            )
            mail.append((queue, Start(every[queue].ready()[0].actor)))
        queue, event = mail.pop(0)
        for action in every[queue].handle(event):
            if isinstance(action, Act):
                found[queue].append((action.actor, action.micro))
                mail.append((queue, Finished(*action)))
            elif isinstance(action, Send):
                mail.append((action.queue, action.event))
    if not all(machine.statistics().idle for machine in every.values()):
        return None
    orders = [Order(q, tuple(acts)) for q, acts in found.items() if q.startswith("comm") and acts]
    return replace(plan, orders=tuple(orders))


def sequential(plan):
    """What each act computes, told from what it reads: found from the acts that make it, in no order at all."""
    registers = {register.value.name: register for register in plan.registers}

    @cache
    def content(name, version):
        register = registers[name]
        if version < register.full:
            return (name, "start")
        per = plan.actors[register.producer].acts // register.rate
        first = (version - register.full) * per
        return tuple(act(register.producer, index) for index in range(first, first + per))

    @cache
    def act(id, index):
        actor = plan.actors[id]
        reads = [(name, registers[name].rate) for name in actor.consumes]
        return hash(
            (id, index, *(content(name, index * rate // actor.acts) for name, rate in reads))
        )

    return act


class Acts:
    """What the acts of a plan compute from the versions of registers that are there."""

    def __init__(self, plan):
        self.plan = plan
        self.registers = {register.value.name: register for register in plan.registers}
        self.contents = {(n, 0): (n, "start") for n, r in self.registers.items() if r.full}
        # What each act computed; for each register, parts of the version that is being made.
        self.done, self.parts = {}, {}

    def start(self, act):
        index, actor = self.index(act), self.plan.actors[act.actor]
        rates = [(name, self.registers[name].rate) for name in actor.consumes]
        reads = [self.contents[name, index * rate // actor.acts] for name, rate in rates]
        self.done[actor.id, index] = hash((actor.id, index, *reads))

    def finish(self, act):
        index, actor = self.index(act), self.plan.actors[act.actor]
        for name in actor.produces:
            register = self.registers[name]
            made = self.parts.setdefault(name, [])
            made.append(self.done[actor.id, index])
            if len(made) == actor.acts // register.rate:
                version = index * register.rate // actor.acts + register.full
                self.contents[name, version] = tuple(self.parts.pop(name))

    def index(self, act):
        return act.step * self.plan.actors[act.actor].acts + act.micro


def run_randomly(plan, steps, seed):
    """Run with messages and ends of acts in random order; checks credits, and returns what each act computed."""
    chance = random.Random(seed)
    every, acts, ended = machines(plan), Acts(plan), []
    mail = {(a, b): [] for a in (*every, "begin") for b in every}
    for queue in every:
        mail["begin", queue] = [Begin(step) for step in range(steps)]
    while any(mail.values()):
        source, target = chance.choice(sorted(key for key, letters in mail.items() if letters))
        event = mail[source, target].pop(0)
        if isinstance(event, Finished):
            acts.finish(event)
        for action in every[target].handle(event):
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


@settings(
    max_examples=150, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(pipelines(), st.integers(0, 99))
def test_any_timing_computes_what_the_sequential_order_does(plan, seed):
    if plan is None:
        return
    done = run_randomly(plan, 2, seed)
    act = sequential(plan)
    assert len(done) == 2 * sum(actor.acts for actor in plan.actors)
    assert all(done[id, index] == act(id, index) for id, index in done)
    assert len(rehearse(plan, 2)) == len(done)


@settings(
    max_examples=100, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(pipelines(enough=True))
def test_a_credit_for_each_micro_batch_is_always_enough(plan):
    assert plan is not None
    rehearse(plan, 3)
