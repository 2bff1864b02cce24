"""Gathers of ZeRO 3 in pipelines: none waits for the backward of the micro-batch before."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from search.jobs import decoder
from weft.ir.plan import Communicate, Compute, RankPlan
from weft.planning.grid import placement_on
from weft.planning.plans import plan_stored
from weft.strategy.parts import Schedule

STAGES = 2


def plans(schedule: Schedule | None, stages: int = STAGES) -> tuple[RankPlan, ...]:
    """Of a decoder of four blocks with ZeRO 3 on two ranks a stage, and four micro-batches."""
    strategy = replace(
        weft.data_parallel(),
        zero=weft.Zero(3),
        stages=stages if stages > 1 else (),
        micro_batches=2,
        schedule=schedule,
        grid=(2 * stages,),
    )
    placement = placement_on("cpu", 2 * stages, strategy)
    return plan_stored(decoder(4), strategy, placement).plan.ranks


def shares(plan: RankPlan) -> bool:
    """True where a backward reads what was gathered for a forward."""
    acting = [each for each in plan.actors if isinstance(each, Compute | Communicate)]
    phases = {actor.id: actor.phase.kind for actor in acting}
    gathers = {
        each.id
        for each in acting
        if isinstance(each, Communicate)
        and {collective.kind for collective in each.collectives} == {"all_gather"}
    }
    return any(
        phases[each.producer] == "forward" and phases.get(reader) == "backward"
        for each in plan.registers
        if each.producer in gathers
        for reader in each.consumers
    )


@pytest.mark.parametrize("schedule", [None, "1f1b", "gpipe", "zero_bubble"])
def test_only_the_last_stage_keeps_what_it_gathered_for_the_backward(
    schedule: Schedule | None,
) -> None:
    """Others would keep it for as long as a micro-batch is in flight, and gather for the next one behind its backward:
    four stages took 2.5 times as long. With GPipe the last one has all in flight, too.
    """
    first, *_, last = plans(schedule)
    assert not shares(first)
    assert shares(last) == (schedule != "gpipe")
