"""Named and computed schedules of pipelines of unit work: their bubbles and what they keep, as published."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

import weft
from build import value
from pipelines import pipeline
from weft.actors.deadlock import max_cycle_ratio
from weft.compiler.context import Stages
from weft.compiler.schedule.actor_graph import ActorGraph, Slot, with_copies
from weft.compiler.schedule.credits import enough_slots, fewest_slots, preset_slots
from weft.compiler.schedule.presets import PRESETS, Preset, interleaved_in_flight, preset
from weft.errors import InternalError, StrategyError
from weft.ir.plan import Compute, Register
from weft.simulator.clock import SimulatedStep, simulate_step
from weft.strategy.parts import SCHEDULES, Schedule

SIZES = [(2, 4), (4, 8), (3, 9)]
# A backward of both parts takes as long as two forwards.
TWICE = {"backward": 2.0}


def simulated(actor_graph: ActorGraph, copies: Mapping[Slot, int]) -> SimulatedStep:
    return simulate_step(
        [with_copies(plan, copies) for plan in actor_graph.plans], actor_graph.seconds
    )


def by_name(name: Schedule, stages: int, micro_batches: int, around: int = 0) -> Preset:
    return Preset(name, stages, around or stages, micro_batches)


def kept(actor_graph: ActorGraph, found: SimulatedStep, stage: int) -> int:
    """The most micro-batches that have begun their forward and not ended their backward in a stage."""
    plan = actor_graph.plans[stage % len(actor_graph.plans)]
    own = [
        actor for actor in plan.actors if isinstance(actor, Compute) and actor.phase.stage == stage
    ]
    acts = found.timelines[plan.rank]
    events = [(act.start, 1) for act in acts if act.actor == own[0].id]
    events += [(act.end, -1) for act in acts if act.actor == own[-1].id]
    now = most = 0
    for _, change in sorted(events):
        now += change
        most = max(most, now)
    return most


@pytest.mark.parametrize(("stages", "micro_batches"), SIZES)
@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_bubble_and_memory_of_gpipe_and_1f1b(
    name: Schedule, stages: int, micro_batches: int
) -> None:
    rule = by_name(name, stages, micro_batches)
    actor_graph = pipeline(rule, seconds=TWICE)
    found = simulated(actor_graph, preset_slots(actor_graph, rule))
    # (S - 1) / (M + S - 1) of the time is bubble.
    assert found.makespan == 3 * (micro_batches + stages - 1)
    for stage in range(stages):
        in_flight = micro_batches if name == "gpipe" else min(micro_batches, stages - stage)
        assert kept(actor_graph, found, stage) == in_flight


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 8), (4, 8), (4, 12)])
def test_zero_bubble_is_as_short_as_published(stages: int, micro_batches: int) -> None:
    """ZB-H1: a bubble of (S - 1) (F + B - W), with no more in flight than 1F1B's first stage has."""
    rule = by_name("zero_bubble", stages, micro_batches)
    actor_graph = pipeline(rule, split=True)
    found = simulated(actor_graph, preset_slots(actor_graph, rule))
    assert found.makespan == 3 * micro_batches + stages - 1
    assert all(kept(actor_graph, found, stage) <= stages for stage in range(1, stages))


@pytest.mark.parametrize(
    ("around", "stages", "micro_batches"), [(2, 4, 8), (4, 8, 8), (4, 8, 16), (4, 16, 8)]
)
def test_interleaved_has_a_smaller_bubble(around: int, stages: int, micro_batches: int) -> None:
    rule = by_name("interleaved", stages, micro_batches, around)
    actor_graph = pipeline(rule)
    found = simulated(actor_graph, preset_slots(actor_graph, rule))
    chunks = stages // around
    busy, plain = 2 * micro_batches * chunks, 2 * (around - 1) * chunks
    bubble = found.makespan - busy
    # Megatron's is 1F1B's over the number of chunks; without its list of acts one or two units are lost.
    assert plain / chunks <= bubble <= plain / chunks + 2 < plain or bubble == plain / chunks


def test_megatron_counts_of_interleaved_stages() -> None:
    # Two ranks, two stages each, by hand: rank 0 begins with 2 (2 - 0 - 1) + 2 = 4 forward acts.
    assert [interleaved_in_flight(stage, 4, 2, 8) for stage in range(4)] == [4, 3, 2, 1]
    assert interleaved_in_flight(0, 4, 2, 2) == 2


def test_computed_copies_are_those_of_1f1b() -> None:
    """With free transfers the slowest cycle of stage s takes 3 (S - s) seconds, and each queue 3."""
    rule = by_name("zero_bubble", 4, 8)
    actor_graph = pipeline(rule, seconds=TWICE)
    copies = enough_slots(actor_graph)
    assert [copies[stage, f"s{stage}"] for stage in range(4)] == [4, 3, 2, 1]
    plans = [with_copies(plan, copies) for plan in actor_graph.plans]
    ratio, _ = max_cycle_ratio(ActorGraph(tuple(plans), actor_graph.seconds).marked_graph(copies))
    assert ratio == actor_graph.busiest == 3
    less = {**copies, (1, "s1"): 2}
    assert simulated(actor_graph, less).makespan > simulated(actor_graph, copies).makespan


def test_fewest_copies_run_one_micro_batch_at_a_time() -> None:
    rule = by_name("zero_bubble", 3, 4)
    actor_graph = pipeline(rule, seconds=TWICE)
    assert set(fewest_slots(actor_graph).values()) == {1}
    assert simulated(actor_graph, fewest_slots(actor_graph)).makespan == 4 * 3 * 3


def test_what_is_read_after_a_barrier_exists_for_every_micro_batch() -> None:
    """A loss over the whole batch: all forwards before the first backward."""
    actor_graph = pipeline(by_name("1f1b", 1, 5))
    plan = actor_graph.plans[0]
    forward, backward = (actor for actor in plan.actors if isinstance(actor, Compute))
    forward = replace(forward, produces=(*forward.produces, "all"))
    backward = replace(backward, id=2, consumes=(*backward.consumes, "loss"))
    actors = (forward, Compute(1, (), ("all",), ("loss",)), backward)
    once = (
        Register(value("all"), "activation", 0, (1,)),
        Register(value("loss"), "activation", 1, (2,)),
    )
    kept = (replace(each, consumers=(2,)) for each in plan.registers)
    actor_graph = ActorGraph(
        (replace(plan, actors=actors, registers=(*kept, *once)),), {0: [1.0, 1.0, 1.0]}
    )
    assert fewest_slots(actor_graph) == {(0, "s0"): 5}
    assert simulated(actor_graph, fewest_slots(actor_graph)).makespan == 11
    with pytest.raises(InternalError, match="a free copy of s0, of 4"):
        simulated(actor_graph, {(0, "s0"): 4})


def test_a_circle_of_ranks_is_named() -> None:
    """The last stage's forward waits for what the first stage makes of its gradient."""
    actor_graph = pipeline(by_name("1f1b", 2, 2))
    first, last = actor_graph.plans
    back = next(actor.id for actor in first.actors if isinstance(actor, Compute) and actor.id)
    begins, ends = first.actors[0], first.actors[back]
    assert isinstance(begins, Compute)
    assert isinstance(ends, Compute)
    forward, ended = replace(begins, consumes=("turn",)), replace(ends, produces=("turn",))
    control = Register(value("turn"), "control", back, (0,), rate=2)
    stuck = replace(
        first,
        actors=(forward, *first.actors[1:back], ended, *first.actors[back + 1 :]),
        registers=(*first.registers, control),
    )
    with pytest.raises(InternalError) as error:
        fewest_slots(ActorGraph((stuck, last), actor_graph.seconds))
    text = str(error.value)
    assert "rank 0: forward of stage 0, Compute 0 on compute waits for rank 0: backward" in text
    assert "rank 1: backward of stage 1, Compute" in text


def test_transfers_that_take_long_get_more_copies() -> None:
    rule = by_name("zero_bubble", 2, 8)
    near, far = (pipeline(rule, seconds=TWICE, transfer=t) for t in (0.0, 1.5))
    assert enough_slots(far)[0, "s0"] > enough_slots(near)[0, "s0"]
    steady = simulated(far, enough_slots(far)).makespan
    assert steady < simulated(far, enough_slots(near)).makespan


def test_room_bounds_copies() -> None:
    rule = by_name("zero_bubble", 4, 8)
    actor_graph = pipeline(rule, seconds=TWICE)
    # Two more of 4,000 bytes on the first rank, none on the second: it sets the pace of 9 seconds.
    copies = enough_slots(actor_graph, {0: 8100, 1: 100, 2: 10**6, 3: 10**6})
    assert copies[0, "s0"] <= 3
    assert (copies[1, "s1"], copies[2, "s2"]) == (1, 1)


def test_every_schedule_has_a_row() -> None:
    assert tuple(PRESETS) == SCHEDULES
    assert [name for name, row in PRESETS.items() if row.splits_weights] == ["zero_bubble"]
    assert [name for name, row in PRESETS.items() if row.takes_turns] == ["interleaved"]
    for row in PRESETS.values():
        assert sorted(row.order) == ["backward", "forward", "weight"]


def test_interleaved_wants_several_stages_on_a_rank() -> None:
    places = tuple(weft.placement("cpu", [rank]) for rank in (0, 1, 0, 1))
    assert preset("interleaved", Stages(places), 4).around == 2
    with pytest.raises(StrategyError, match="stages=4 on 2 ranks"):
        preset("interleaved", Stages(places[:2]), 4)
    assert replace(preset("1f1b", Stages(places[:2]), 4), stages=3).in_flight(0) == 3
