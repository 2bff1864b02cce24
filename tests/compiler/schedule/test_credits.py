"""Registers, credits, and the proof that a plan cannot wait for itself."""

from __future__ import annotations

from dataclasses import replace

import pytest

from build import value
from drafts import planned
from local_programs import all_reduce, call, program, training_step, update
from weft.compiler.schedule.actor_graph import prove_live
from weft.errors import InternalError
from weft.ir.plan import Communicate, Compute, RankPlan, Register


def plan_of_a_step() -> RankPlan:
    return planned(training_step(), bucket_bytes=1)


def test_registers_of_a_step() -> None:
    registers = {register.value.name: register for register in plan_of_a_step().registers}
    assert registers["x"].credits == 2
    assert registers["x"].kind == "batch"
    assert registers["gw.sum"].kind == "communication"
    assert registers["gv"].kind == "activation"
    weight = registers["w"]
    assert (weight.kind, weight.credits, weight.full) == ("parameter", 1, True)
    # Forward and backward read w; the actor that updates it is its producer.
    assert weight.consumers == (2, 4)
    assert weight.producer == 6


def test_an_update_before_a_reader_is_refused_with_the_cycle() -> None:
    early = Compute(0, (update("w", "g"),), ("g",), ("w",))
    late = Compute(1, (call("g", "w"),), ("w",), ("g",))
    registers = (
        Register(value("w"), "parameter", 0, (1,), full=True),
        Register(value("g"), "activation", 1, (0,)),
    )
    plan = RankPlan(0, (), (early, late), registers)
    prove_live(plan)
    stuck = replace(plan, registers=(replace(registers[0], full=False), registers[1]))
    with pytest.raises(
        InternalError, match=r"Compute 0 on compute \(SGD update\) waits for actor 1 over g"
    ):
        prove_live(stuck)


def test_communications_in_an_order_that_waits_for_itself_are_refused() -> None:
    # The second reduction before the first on one queue: its input is made after the first one's result is read.
    chain = program([call("a", "x"), all_reduce("s", "a"), call("b", "s"), all_reduce("loss", "b")])
    good = planned(chain, bucket_bytes=1)
    first, second = (actor for actor in good.actors if isinstance(actor, Communicate))
    swapped = {first.id: second, second.id: first}
    actors = tuple(swapped.get(actor.id, actor) for actor in good.actors)
    with pytest.raises(InternalError, match="order of comm:0"):
        prove_live(replace(good, actors=actors))
