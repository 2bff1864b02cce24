"""Gathers of ZeRO 3 in pipelines: none waits for the backward of the micro-batch before."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from search.jobs import decoder
from weft.ir.plan import Communicate, Compute, RankPlan
from weft.planning.machine import placement_on
from weft.planning.plans import plan_stored
from weft.strategy.parts import Schedule


def plans(
    schedule: Schedule | None, in_flight: tuple[int, ...] | None = None
) -> tuple[RankPlan, ...]:
    """Of a decoder of four blocks with ZeRO 3 in two stages of two ranks, and two micro-batches."""
    strategy = replace(
        weft.data_parallel(),
        zero=weft.Zero(3),
        stages=2,
        micro_batches=2,
        schedule=schedule,
        in_flight=in_flight,
        grid=(4,),
    )
    placement = placement_on("cpu", 4, strategy)
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


def test_the_last_stage_gathers_twice_where_several_are_in_flight_there() -> None:
    _, *_, last = plans("1f1b", in_flight=(2, 2))
    assert not shares(last)
