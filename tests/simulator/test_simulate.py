"""Simulations of a small GPT: times, memory, bytes; folded ranks as unfolded ones; given costs."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from simulator.steps import SAMPLES, TIME, planned_gpt, tasks_of
from weft.errors import UserError
from weft.hardware import default_device
from weft.hardware.costs import Capacity, Contention, Cost, Costs, parse_cost_overrides
from weft.simulator import simulate
from weft.simulator.clock import run
from weft.simulator.simulate import SteadySteps
from weft.units import Bytes, Seconds

CPU = default_device("cpu")


class Machine:
    """The usual device with what a topology would know besides, and more seconds for a rank."""

    def __init__(self, **capacity) -> None:
        self.limits = Capacity("kind", {"float32": 1e12}, **capacity)

    def __getattr__(self, name):
        return getattr(CPU, name)

    def capacity(self, rank: int) -> Capacity:
        return self.limits


class Noisy(Machine):
    """Calls vary by a tenth."""

    def of_call(self, rank, call, lies=()):
        return Cost(CPU.of_call(rank, call).seconds, spread=0.1)


class Guessing(Machine):
    """Knows no matrix products."""

    def of_call(self, rank, call, lies=()):
        found = CPU.of_call(rank, call)
        return found._replace(estimate=f"{call.op}: a guess") if "mm" in call.op else found


def test_a_step_lasts_as_its_plan_was_simulated_to():
    step = planned_gpt()
    found = simulate(step, CPU)
    assert found.steady
    path = sum(each.end - each.start for each in found.path)
    assert path == pytest.approx(found.step_seconds, rel=1e-9)
    for one, next_one in zip(found.path, found.path[1:], strict=False):
        assert one.end == next_one.start
    for each in found.ranks:
        assert max(each.busy.values()) <= found.step_seconds * (1 + 1e-6)
        assert each.parts.hidden + each.parts.exposed == pytest.approx(each.parts.communication)
    assert found.tokens_per_second == SAMPLES * TIME / found.step_seconds
    assert "fits" not in str(found)
    assert found.mfu is None


@pytest.mark.parametrize("stages", [1, 2])
def test_folded_ranks_are_simulated_as_unfolded_ones(stages):
    folded, whole = (simulate(planned_gpt(stages, folded=each), CPU) for each in (True, False))
    assert len(folded.ranks) < len(whole.ranks)
    assert (folded.step_seconds, folded.bubble) == (whole.step_seconds, whole.bubble)
    assert folded.memory.planned == whole.memory.planned


def test_what_a_machine_knows_is_compared_with_what_a_step_takes():
    machine = Machine(memory=Bytes(100_000), reserve=Bytes(1000))
    found = simulate(planned_gpt(), machine)
    assert found.mfu == pytest.approx(found.flops / found.step_seconds / 4e12)
    assert found.memory.total == found.memory.planned + 1000
    assert found.memory.fits
    assert "fits" in str(found)
    small = simulate(planned_gpt(), Machine(memory=Bytes(1000)))
    assert not small.memory.fits
    assert "DOES NOT FIT" in str(small)
    content = json.loads(json.dumps(small.to_json()))
    assert content["memory"]["fits"] is False
    assert content["step_seconds"] == small.step_seconds


def test_calls_take_longer_beside_communications():
    step = planned_gpt()
    alone, beside = (simulate(step, Machine(slowdown=Contention(factor))) for factor in (1.0, 2.0))
    compute = [sum(each.busy["compute"] for each in one.ranks) for one in (alone, beside)]
    hidden = sum(each.parts.hidden for each in alone.ranks)
    assert compute[0] < compute[1] <= compute[0] + 2 * hidden
    assert beside.step_seconds > alone.step_seconds
    assert simulate(step, Machine(slowdown=Contention())) == alone


def test_the_host_takes_its_time_between_steps():
    plain = simulate(planned_gpt(), Noisy())
    found = simulate(planned_gpt(), Noisy(step=Seconds(0.5)))
    assert found.step_seconds == pytest.approx(plain.step_seconds + 0.5)
    assert found.first_seconds == pytest.approx(plain.first_seconds + 0.5)
    assert found.interval == pytest.approx(tuple(each + 0.5 for each in plain.interval))


def test_steps_of_launched_devices_overlap():
    step = planned_gpt()
    after, ahead = (simulate(step, Machine(launched=each)) for each in (False, True))
    assert ahead.step_seconds <= after.step_seconds
    assert ahead.first_seconds == after.first_seconds


@pytest.mark.parametrize("launched", [False, True])
def test_shares_of_a_rank_are_those_of_one_step(launched):
    """Where the host runs a step ahead, too: each instant counts once."""
    found = simulate(planned_gpt(), Machine(launched=launched))
    assert found.steady
    for each in found.ranks:
        shares = each.parts
        whole = shares.compute + shares.exposed + shares.idle
        assert whole == pytest.approx(shares.step, rel=1e-9)
        assert shares.step == pytest.approx(found.step_seconds, rel=1e-5)
        assert each.bubble == pytest.approx(1 - each.busy["compute"] / shares.step)


def test_a_step_with_nothing_beside_its_end_does_not_count():
    assert simulate(planned_gpt(), Machine(slowdown=Contention(2.0), launched=True)).steady


def test_what_varies_makes_an_interval_and_equal_calls_give_equal_ones():
    step = planned_gpt()
    assert simulate(step, Machine()).interval is None
    found = simulate(step, Noisy())
    low, high = found.interval
    assert low < found.step_seconds < high
    assert simulate(step, Noisy()).interval == found.interval
    drifting = simulate(step, Machine(drift=0.1)).interval
    assert drifting[0] == pytest.approx(found.step_seconds * (1 - 1.645 * 0.1), rel=0.05)


def test_missing_figures_are_told():
    found = simulate(planned_gpt(), Guessing())
    assert "aten.mm.default: a guess" in found.estimates
    text = str(found)
    assert "about: figures are missing" in text
    assert "aten.mm.default: a guess" in text
    assert "estimated" in text


@pytest.mark.parametrize(
    ("samples", "text"), [(100_000, "400,000 a second"), (3, "12 a second"), (1, "4 a second")]
)
def test_samples_a_second_are_read_at_a_glance(samples, text):
    found = replace(simulate(planned_gpt(), CPU), samples=samples, step_seconds=Seconds(0.25))
    assert f"samples     {text}" in str(found)


def test_bytes_that_are_sent_are_those_of_the_plan():
    step = planned_gpt(folded=False)
    whole = 0
    for plan in step.plans:
        for own in plan.on_queue.values():
            for actor in own:
                for each in getattr(actor, "collectives", ()):
                    size = len(step.communicators[each.communicator].ranks)
                    whole += actor.acts * each.bytes / size
    assert simulate(step, CPU).sent_bytes == round(whole)


def given(**content):
    return parse_cost_overrides(content, "costs.yaml")


def test_given_stage_times_make_the_published_bubble():
    step = planned_gpt(4, 1, 8)
    unit = {"*": {"forward": 1.0, "backward": 2.0, "update": 0.0}}
    exchanges = dict.fromkeys(("transfer", "all_reduce"), 0.0)
    found = simulate(step, CPU, given(stages=unit, exchanges=exchanges))
    # (micro-batches + stages - 1) (forward + backward), as 1F1B is known to take; a little less, since
    # what goes back to the stage before is ready before the last gradients of parameters are.
    assert found.step_seconds == pytest.approx(11 * 3.0, rel=0.01)
    assert found.step_seconds <= 11 * 3.0


def test_given_times_of_modules_and_ops_count():
    step = planned_gpt(1, 2, 1, None)
    blocks = {"blocks.*": {"forward": 1.0, "backward": 2.0}}
    found = simulate(step, CPU, given(modules=blocks))
    plain = simulate(step, CPU)
    assert 6.0 < found.step_seconds < 6.0 + plain.step_seconds
    found = simulate(step, CPU, given(ops={"aten.native_layer_norm.default": 1.0}))
    assert found.costs[0].what == "aten.native_layer_norm.default"
    assert found.step_seconds > 3.0


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"stages": {"7": {"forward": 1.0}}}, "'7' is nowhere in the plan; there are 0, 1"),
        ({"ops": {"aten.none": 1.0}}, "'aten.none' is nowhere"),
        ({"modules": {"layers.*": {"forward": 1.0}}}, "there are blocks"),
        (
            {"modules": {"*": {"forward": 1.0}, "blocks.0": {"forward": 2.0}}},
            "'blocks.0' is hidden by a pattern before it; put it first",
        ),
    ],
)
def test_costs_of_what_is_not_there_are_refused(content, said):
    with pytest.raises(UserError, match=said):
        simulate(planned_gpt(), CPU, given(**content))


def test_a_slower_rank_is_waited_for():
    step = planned_gpt(folded=False)

    class Slow(Machine):
        def like(self, rank):
            return rank

        def of_call(self, rank, call, lies=()):
            took = CPU.of_call(rank, call)
            return took._replace(seconds=Seconds(took.seconds * (1 + (rank == 3))))

    costs: Costs = Slow()
    slow, plain = simulate(step, costs), simulate(step, CPU)
    assert slow.step_seconds > plain.step_seconds
    assert max(slow.ranks, key=lambda each: each.busy["compute"]).rank == 3
    assert replace(slow, traces=()) == slow


@pytest.mark.parametrize(
    ("ends", "seconds", "steady"),
    [
        ([9.0], 9.0, False),
        ([9.0, 14.0, 19.0], 5.0, True),
        ([9.0, 13.0, 19.0, 23.0, 29.0], 5.0, False),
        ([9.0, 10.0, 12.0, 16.0, 24.0, 40.0], 28.0 / 3, False),
    ],
    ids=["one step", "steady", "two in turns", "all different"],
)
def test_a_step_takes_the_mean_of_a_cycle(ends, seconds, steady) -> None:
    none = tasks_of((), {})
    found = SteadySteps(none, run(none), ends, Seconds(1.0))
    assert (found.period, found.steady) == (seconds, steady)
    assert found.step_seconds == seconds + 1.0
