"""The state machine of one queue: who acts when, and which messages it sends."""

from __future__ import annotations

import pytest

from build import register
from plan_runs import react
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
    Waiting,
    machines,
)
from weft.errors import InternalError
from weft.ir.plan import Compute, Feed, Fetch, Hold, RankPlan


def chain(credits=1):
    """Feed 0 -> x -> Compute 1 -> y -> Fetch 2."""
    return RankPlan(
        0,
        (),
        (
            Feed(0, ("x",), ("x",)),
            Compute(1, (), ("x",), ("y",)),
            Fetch(2, ("y",), ("y",)),
        ),
        (register("x", 0, 1, credits=credits), register("y", 1, 2, credits=credits)),
    )


def computes(*reads_writes):
    return tuple(
        Compute(id, (), tuple(reads), tuple(writes))
        for id, (reads, writes) in enumerate(reads_writes)
    )


def test_messages_of_one_act():
    machine = QueueMachine(chain(), "compute", in_order=False)
    assert react(machine, Begin(0)) == ()
    assert react(machine, Ready("x", 0)) == (Act(1, 0),)
    assert react(machine, Finished(1, 0)) == (
        Send("host", Ready("y", 0)),
        Free("y", 0),
        Send("host", Released("x", 0)),
        EndStep(0),
    )


def test_finishing_is_short_for_the_event():
    one, other = (QueueMachine(chain(), "compute", in_order=False) for _ in range(2))
    for machine in (one, other):
        react(machine, Begin(0))
        react(machine, Ready("x", 0))
    assert tuple(one.finish()) == react(other, Finished(1, 0))
    assert one.statistics() == other.statistics()
    with pytest.raises(InternalError, match="nothing runs"):
        one.finish()


def test_a_producer_without_a_free_copy_waits():
    machine = QueueMachine(chain(), "compute", in_order=False)
    for event in (Begin(0), Begin(1), Ready("x", 0), Finished(1, 0), Ready("x", 1)):
        actions = react(machine, event)
    assert actions == ()
    assert machine.statistics().waiting == (Waiting(1, 1, (), ("y",)),)
    assert react(machine, Released("y", 0)) == (Act(1, 1),)


def test_two_credits_let_the_producer_run_ahead():
    machine = QueueMachine(chain(credits=2), "host", in_order=False)
    actions = [react(machine, Begin(step)) for step in range(3)]
    assert actions[0] == (Act(0, 0),)
    assert react(machine, Finished(0, 0))[-1] == Act(0, 1)
    assert Act(0, 2) not in react(machine, Finished(0, 1))
    assert react(machine, Released("x", 0)) == (Act(0, 2),)


def test_no_actor_acts_before_its_step_begins():
    plan = RankPlan(0, (), computes(((), ("x",))), (register("x", 0),))
    machine = QueueMachine(plan, "compute", in_order=False)
    assert react(machine, Begin(0)) == (Act(0, 0),)
    assert react(machine, Finished(0, 0)) == (Free("x", 0), EndStep(0))
    assert react(machine, Begin(1)) == (Act(0, 1),)


def test_a_variable_is_updated_after_its_last_reader():
    """Actor 0 reads w and makes g for actor 1, which updates w in place; actor 2 reads w too, late."""
    plan = RankPlan(
        0,
        (),
        (
            Compute(0, (), ("w",), ("g",)),
            Compute(1, (), ("g",), ("w",)),
            Fetch(2, ("w",), ("w",)),
        ),
        (register("w", 1, 0, 2, full=True), register("g", 0, 1)),
    )
    machine = QueueMachine(plan, "compute", in_order=False)
    assert react(machine, Begin(0)) == (Act(0, 0),)
    react(machine, Begin(1))
    assert react(machine, Finished(0, 0)) == ()
    assert machine.statistics().waiting[1] == Waiting(1, 0, (), ("w",))
    assert react(machine, Released("w", 0)) == (Act(1, 0),)
    actions = react(machine, Finished(1, 0))
    assert Send("host", Ready("w", 1)) in actions
    assert actions[-1] == Act(0, 1)


def test_constants_need_no_messages():
    plan = RankPlan(
        0,
        (),
        (Hold(0, ("k",)), Compute(1, (), ("k",), ())),
        (register("k", 0, 1, full=True),),
    )
    machine = QueueMachine(plan, "compute", in_order=False)
    for step in range(3):
        assert react(machine, Begin(step)) == (Act(1, step),)
        assert react(machine, Finished(1, step)) == (EndStep(step),)


def two_sources(queue):
    """Two actors without an edge between them; what each consumes comes from the host."""
    return RankPlan(
        0,
        (),
        (
            Compute(0, (), ("a",), (), queue),
            Compute(1, (), ("b",), (), queue),
            Feed(2, ("a", "b"), ("a", "b")),
        ),
        (register("a", 2, 0, credits=2), register("b", 2, 1, credits=2)),
    )


def test_the_earliest_step_goes_first_then_the_lowest_id():
    machine = QueueMachine(two_sources("compute"), "compute", in_order=False)
    react(machine, Begin(0))
    react(machine, Begin(1))
    assert react(machine, Ready("a", 0)) == (Act(0, 0),)
    for event in (Ready("a", 1), Ready("b", 0), Ready("b", 1)):
        assert react(machine, event) == ()
    order = []
    act = Act(0, 0)
    while act:
        order.append(act)
        actions = react(machine, Finished(*act))
        act = next((action for action in actions if isinstance(action, Act)), None)
    assert order == [Act(0, 0), Act(1, 0), Act(0, 1), Act(1, 1)]


def test_a_communicator_keeps_the_order_of_the_plan():
    machine = QueueMachine(two_sources("comm:0"), "comm:0", in_order=True)
    react(machine, Begin(0))
    assert react(machine, Ready("b", 0)) == ()
    assert react(machine, Ready("a", 0)) == (Act(0, 0),)
    assert react(machine, Finished(0, 0))[-1] == Act(1, 0)


def test_one_message_for_all_readers_of_a_queue():
    plan = RankPlan(
        0,
        (),
        (Feed(0, ("x",), ("x",)), *(Compute(id, (), ("x",), ()) for id in (1, 2, 3))),
        (register("x", 0, 1, 2, 3),),
    )
    host = QueueMachine(plan, "host", in_order=False)
    host.handle(Begin(0))
    assert host.start() == Act(0, 0)
    said = [Send("compute", Ready("x", 0)), Free("x", 0), EndStep(0)]
    assert host.handle(Finished(0, 0)) == said
    compute = QueueMachine(plan, "compute", in_order=False)
    compute.handle(Begin(0))
    released = []
    react(compute, Ready("x", 0))
    for id in (1, 2, 3):
        released += [
            action for action in react(compute, Finished(id, 0)) if isinstance(action, Send)
        ]
    assert released == [Send("host", Released("x", 0))]


@pytest.mark.parametrize(
    "event",
    [
        Begin(1),
        Ready("y", 0),
        Ready("x", 1),
        Released("x", 0),
        Released("y", 0),
        Finished(1, 0),
        Ready("nothing", 0),
    ],
)
def test_an_event_that_cannot_be_is_an_error(event):
    machine = QueueMachine(chain(), "compute", in_order=False)
    with pytest.raises(InternalError):
        react(machine, event)


@pytest.mark.parametrize(
    ("registers", "message"),
    [
        ((register("x", 0, 1), register("y", 1)), "actor 2 reads y"),
        ((register("x", 1, 1), register("y", 1, 2)), "actor 0 writes x"),
        ((register("x", 0, 1, credits=0), register("y", 1, 2)), "x has no credit"),
    ],
)
def test_a_plan_whose_actors_and_registers_differ_is_refused(registers, message):
    plan = RankPlan(0, (), chain().actors, registers)
    with pytest.raises(InternalError, match=message):
        machines(plan)
