"""All ranks together on a virtual clock: times, orders, and the circle of a hang."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest

import build
from build import value
from weft.actors.wiring import equal_registers
from weft.errors import InternalError
from weft.ir.nodes import Phase
from weft.ir.plan import (
    Collective,
    Communicate,
    Compute,
    Order,
    RankPlan,
    Register,
    Transfer,
)
from weft.simulator.clock import simulate_step

BACKWARD = Phase(0, "backward")


def send(id, source, queue="comm:0", acts=2):
    return Communicate(id, (Transfer(0, value(source), None, (), ()),), queue, acts)


def receive(id, output, queue="comm:0", acts=2):
    return Communicate(id, (Transfer(0, None, value(output), (), ()),), queue, acts)


def reduce(id, source, output, communicator):
    parts = (Collective("all_reduce", communicator, value(source), value(output)),)
    return Communicate(id, parts, f"comm:{communicator}")


# Once for each of two micro-batches.
register = partial(build.register, rate=2)


def two_stages(credits=2):
    """Rank 0: F, send, receive, B; rank 1: receive, F, B, send. Two micro-batches."""
    first = RankPlan(
        0,
        (),
        (
            Compute(0, (), (), ("x", "saved"), acts=2, priority=1),
            send(1, "x"),
            receive(2, "g", "comm:1"),
            Compute(3, (), ("g", "saved"), (), acts=2, phase=BACKWARD),
        ),
        (
            register("x", 0, 1, credits=credits),
            register("saved", 0, 3, credits=credits),
            register("g", 2, 3),
        ),
        micro_batches=2,
    )
    second = RankPlan(
        1,
        (),
        (
            receive(0, "x"),
            Compute(1, (), ("x",), ("saved",), acts=2, priority=1, phase=Phase(1, "forward")),
            Compute(2, (), ("saved",), ("g",), acts=2, phase=Phase(1, "backward")),
            send(3, "g", "comm:1"),
        ),
        (register("x", 0, 1), register("saved", 1, 2), register("g", 2, 3)),
        micro_batches=2,
    )
    return first, second


SECONDS = {0: [1, 0.5, 0.25, 2], 1: [0.5, 1, 2, 0.25]}


def test_times_of_two_stages():
    found = simulate_step(two_stages(), SECONDS)
    # Micro-batch 0: F0 to 1, send to 1.5, F1 to 2.5, B1 to 4.5, send to 4.75, B0 to 6.75.
    # Micro-batch 1: F1 waits for B1 of the first (4.5), to 5.5, B1 to 7.5, 7.75, B0 to 9.75.
    assert found.makespan == 9.75
    backward = [(act.micro, act.start, act.end) for act in found.timelines[0] if act.actor == 3]
    assert backward == [(0, 4.75, 6.75), (1, 7.75, 9.75)]
    assert found.orders[0] == (
        Order("comm:0", ((1, 0), (1, 1))),
        Order("comm:1", ((2, 0), (2, 1))),
    )
    assert found == simulate_step(two_stages(), SECONDS)


def test_one_credit_keeps_one_micro_batch_in_flight():
    found = simulate_step(two_stages(credits=1), SECONDS)
    forward = [act.start for act in found.timelines[0] if act.actor == 0]
    assert forward == [0, 6.75]


def test_found_orders_run_again():
    plans = two_stages()
    found = simulate_step(plans, SECONDS)
    fixed = [replace(plan, orders=found.orders[plan.rank]) for plan in plans]
    assert simulate_step(fixed, SECONDS, fixed=True).makespan == found.makespan


def keeping(**more):
    """Two stages, of which the first keeps a second tensor for its backward."""
    first, second = two_stages()
    forward, *middle, backward = first.actors
    actors = (
        replace(forward, produces=("x", "also", "saved")),
        *middle,
        replace(backward, consumes=("also", "g", "saved")),
    )
    x, saved, g = first.registers
    also = register("also", 0, 3, **{"credits": 2, **more})
    return replace(first, actors=actors, registers=(x, also, saved, g)), second


def test_one_of_equal_registers_stands_for_all():
    first, second = keeping()
    assert equal_registers(first) == {"x": "x", "also": "also", "saved": "also", "g": "g"}
    assert simulate_step((first, second), SECONDS) == simulate_step(two_stages(), SECONDS)
    # With one copy it holds the forward back, whatever the other has.
    assert simulate_step(keeping(credits=1), SECONDS) == simulate_step(
        two_stages(credits=1), SECONDS
    )


@pytest.mark.parametrize(
    "other", [{"credits": 1}, {"rate": 1}, {"full": True}, {"producer": 1}, {"consumers": (2, 3)}]
)
def test_registers_that_differ_in_time_are_not_equal(other):
    first, _ = keeping()
    x, also, saved, g = first.registers
    plan = replace(first, registers=(x, replace(also, **other), saved, g))
    assert equal_registers(plan)["saved"] == "saved"


def two_reductions(first, second):
    """Each rank computes a and b, and reduces them in the given order on one communicator."""
    return [
        RankPlan(
            rank,
            (),
            (
                Compute(0, (), (), ("a",)),
                Compute(1, (), ("a.sum",), ("b",)) if chained else Compute(1, (), (), ("b",)),
                reduce(2, "a", "a.sum", 0),
                reduce(3, "b", "b.sum", 0),
            ),
            (
                register("a", 0, 2, rate=1),
                register("b", 1, 3, rate=1),
                register("a.sum", 2, *([1] if chained else []), rate=1),
                register("b.sum", 3, rate=1),
            ),
            orders=(Order("comm:0", order),),
        )
        for rank, (order, chained) in enumerate((first, second))
    ]


def test_a_communicator_takes_what_is_ready_on_all_ranks():
    """Rank 0 has a at 1 and b at 5; rank 1, which begins with b, has b at 1 and a at 3."""
    first, second = two_reductions((AB, False), (AB, False))
    begins = replace(second.actors[0], priority=1)
    plans = [first, replace(second, actors=(begins, *second.actors[1:]))]
    found = simulate_step(plans, {0: [1.0, 4.0, 1.0, 1.0], 1: [2.0, 1.0, 1.0, 1.0]})
    starts = [(act.actor, act.start) for act in found.timelines[0]]
    assert starts == [(0, 0.0), (1, 1.0), (2, 3.0), (3, 5.0)]


AB, BA = ((2, 0), (3, 0)), ((3, 0), (2, 0))


def test_collectives_in_different_orders_on_two_ranks_hang():
    """The example of OneFlow's section 2: each rank waits in another collective."""
    ones = {rank: [1.0] * 4 for rank in range(2)}
    simulate_step(two_reductions((AB, False), (AB, False)), ones, fixed=True)
    with pytest.raises(InternalError) as error:
        simulate_step(two_reductions((AB, False), (BA, False)), ones, fixed=True)
    text = str(error.value)
    assert "rank 0: forward of stage 0, Communicate 2 on comm:0 (all_reduce of a)" in text
    assert "waits for rank 1 to take part" in text
    assert "rank 1: forward of stage 0, Communicate 3 on comm:0 (all_reduce of b)" in text


def test_an_order_against_the_data_hangs():
    ones = {rank: [1.0] * 4 for rank in range(2)}
    plans = two_reductions((BA, True), (BA, True))
    with pytest.raises(InternalError, match=r"waits for its turn on comm:0"):
        simulate_step(plans, ones, fixed=True)
    found = simulate_step(plans, ones)
    assert found.orders[0] == (Order("comm:0", AB),)


def movements(order):
    """OneFlow's example: M1 and M2 move data into one piece of memory; O2 reads m2, O1 reads m1 and what O2 makes.

    Args:
        order: which reader gives the memory on to which movement.
    """
    reader, movement = order
    waits = {1 - movement: (), movement: ("memory",)}
    return RankPlan(
        0,
        (),
        (
            Compute(0, (), waits[0], ("m1",)),
            Compute(1, (), waits[1], ("m2",)),
            Compute(2, (), ("m2",), ("o2",) if reader == 3 else ("o2", "memory")),
            Compute(3, (), ("m1", "o2"), ("memory",) if reader == 3 else ()),
        ),
        (
            register("m1", 0, 3, rate=1),
            register("m2", 1, 2, rate=1),
            register("o2", 2, 3, rate=1),
            Register(value("memory"), "control", reader, (movement,)),
        ),
    )


def test_two_ops_that_share_memory_in_the_wrong_order_hang():
    simulate_step([movements((2, 0))], {0: [1.0] * 4})
    with pytest.raises(InternalError) as error:
        simulate_step([movements((3, 1))], {0: [1.0] * 4})
    lines = [line.split("waits for ")[-1] for line in str(error.value).splitlines()[1:]]
    assert sorted(lines) == ["m2", "memory", "o2"]


def test_too_few_credits_hang_with_the_register():
    """All forward acts before a value over the step, all backward acts after it: one copy is too few."""

    def plan(credits):
        return RankPlan(
            0,
            (),
            (
                Compute(0, (), (), ("saved", "all"), acts=3),
                Compute(1, (), ("all",), ("loss",)),
                Compute(2, (), ("saved", "loss"), (), acts=3, phase=BACKWARD),
            ),
            (
                register("saved", 0, 2, credits=credits, rate=3),
                register("all", 0, 1, rate=1),
                register("loss", 1, 2, rate=1),
            ),
            micro_batches=3,
        )

    simulate_step([plan(3)], {0: [1.0] * 3})
    with pytest.raises(InternalError) as error:
        simulate_step([plan(2)], {0: [1.0] * 3})
    text = str(error.value)
    assert "forward of stage 0 for micro-batch 2" in text
    assert "waits for a free copy of saved, of 2" in text
    assert "backward of stage 0 for micro-batch 0" in text
