"""What acts wait for, so that no order of a run takes more memory than that of the plan."""

from __future__ import annotations

from random import Random

from any_order import any_order
from build import ref
from weft.compiler.memory.order import Moment
from weft.compiler.memory.order_constraints import order_constraints
from weft.compiler.memory.walk import memory
from weft.ir.plan import (
    Collective,
    Communicate,
    Compute,
    Feed,
    Fetch,
    LocalCall,
    LocalInput,
    LocalValue,
    RankPlan,
    Register,
)

KB = 256  # float32 elements in a KiB


def value(name: str, kib: int) -> LocalValue:
    return LocalValue(name, (kib, KB), "float32")


def call(read: str, made: LocalValue) -> LocalCall:
    return LocalCall.of("aten.exp.default", (ref(read),), (made,))


def gathered(kept: int, coming: int) -> RankPlan:
    """`a` of so many KiB is made and used up; only then, in the plan's order, `g` is gathered and read.

    Nothing else keeps the gather from coming while `a` is there.
    """
    x, a, b = value("x", 1), value("a", kept), value("b", 1)
    g, loss = value("g", coming), value("loss", 1)
    gather = Collective("all_gather", 0, value("x", 1), g, sizes=(1, coming - 1))
    last = LocalCall.of("aten.add.Tensor", (ref("b"), ref("g")), (loss,))
    return RankPlan(
        0,
        (LocalInput(x, "batch", "x"),),
        (
            Feed(0, ("x",), ("x",)),
            Compute(1, (call("x", a),), ("x",), ("a",)),
            Compute(2, (call("a", b),), ("a",), ("b",)),
            Communicate(3, (gather,), "comm:0"),
            Compute(4, (last,), ("b", "g"), ("loss",)),
            Fetch(5, ("loss",), ("loss",)),
        ),
        (
            Register(x, "batch", 0, (1, 3), 2),
            Register(a, "activation", 1, (2,)),
            Register(b, "activation", 2, (4,)),
            Register(g, "communication", 3, (4,)),
            Register(loss, "activation", 4, (5,)),
        ),
    )


ORDER = [Moment(begins, actor, 0) for actor in range(6) for begins in (True, False)]


def test_a_gather_waits_for_the_memory_that_it_needs() -> None:
    plan = gathered(kept=8, coming=8)
    found = {turn.actor: turn for turn in order_constraints(plan, ORDER)}
    waiting = [actor for actor, turn in found.items() if turn.waits]
    assert waiting == [3]
    before = {actor for actor, turn in found.items() if turn.place < found[3].waits}
    assert before == {1, 2}


def test_nothing_waits_where_there_is_room() -> None:
    # The reader of the gather leaves as much as `a` takes.
    plan = gathered(kept=1, coming=8)
    assert memory(plan, ORDER).memory.peak == (1 + 1 + 8 + 1) * 1024
    assert not any(turn.waits for turn in order_constraints(plan, ORDER))


def test_no_order_takes_more_than_that_of_the_plan() -> None:
    plan = gathered(kept=8, coming=8)
    peak, acts = memory(plan, ORDER).memory.peak, order_constraints(plan, ORDER)
    random = Random(0)
    held = [any_order(plan, acts, random, begins) for begins in (0.3, 0.9) for _ in range(20)]
    assert max(memory(plan, order).memory.peak for order in held) == peak
    free = [any_order(plan, acts, random, 0.9, waits=False) for _ in range(20)]
    assert max(memory(plan, order).memory.peak for order in free) > peak


def test_ends_are_placed_once_each() -> None:
    found = order_constraints(gathered(8, 8), ORDER)
    assert [turn.actor for turn in found] == [1, 2, 3, 4]
    assert sorted(turn.place for turn in found) == list(range(4))
