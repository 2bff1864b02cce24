"""Candidates keep what is fixed, each strategy once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

import weft
from search.jobs import begun, decoder, job, layers, least_of
from weft.errors import StrategyError, UserError
from weft.search.candidate import Candidate
from weft.search.candidate_table import CandidateTable
from weft.search.measures import Measures
from weft.search.space import space_of, with_fixed
from weft.strategy.parts import Schedule
from weft.strategy.strategy import Strategy


@pytest.mark.parametrize("schedule", [None, "1f1b", "interleaved"])
def test_each_strategy_is_one_point(schedule: Schedule | None) -> None:
    base = Strategy(schedule=schedule)
    found = begun(decoder(4), "h100x2", base=base)
    space = space_of(found.facts, every_rank=False)
    facts = found.facts
    counted = Counter(
        str(candidate.strategy(facts.linears, base, facts.blocks)) for candidate in space
    )
    assert max(counted.values()) == 1
    staged = {(candidate.turns, candidate.schedule) for candidate in space if candidate.stages > 1}
    once = {(1, name) for name in ("", "gpipe", "1f1b", "zero_bubble")}
    assert (
        staged
        == {
            None: {*once, (2, ""), (2, "interleaved")},
            "1f1b": {(1, "1f1b")},
            "interleaved": {(2, "interleaved")},
        }[schedule]
    )


def test_what_is_fixed_holds_for_the_start_too() -> None:
    start = Strategy(batch={"*": weft.split(0)}, parameters={"*": weft.broadcast})
    fixed = Strategy(micro_batches=2, parameters={"0.weight": weft.split(1)}, zero=weft.Zero(1))
    for moves in (1, 12):
        best = weft.search(layers(), "h100x2", moves=moves, fixed=fixed, start=start).best
        assert (best.micro_batches, best.zero) == (2, weft.Zero(1))
        assert next(iter(best.parameters.items())) == ("0.weight", weft.split(1))


def test_zero_by_patterns_is_fixed_as_a_whole() -> None:
    start = Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(2))
    zero = {"0.weight": weft.Zero(3), "*.bias": None}
    for moves in (1, 12):
        best = weft.search(
            layers(), "h100x2", moves=moves, fixed=Strategy(zero=zero), start=start
        ).best
        assert best.zero == zero
    with pytest.raises(StrategyError, match="ZeRO along axis 2 is none of these"):
        weft.search(layers(), "h100x2", moves=1, fixed=Strategy(zero={"*": weft.Zero(1, axis=2)}))


def test_points_with_zero_by_patterns_have_its_highest_level() -> None:
    for zero, level in (({"0.*": weft.Zero(1), "*": weft.Zero(3)}, 3), ({"*": None}, 0)):
        found = begun(layers(), "h100x4", base=Strategy(zero=zero))
        space = space_of(found.facts, every_rank=False)
        assert {candidate.zero for candidate in space} == {level}
        assert {candidate.data > 1 for candidate in space} == ({True} if level else {True, False})


def test_micro_batches_in_flight_are_fixed_with_as_many_stages() -> None:
    base = Strategy(in_flight=(2, 1))
    found = begun(decoder(4), "h100x4", base=base)
    space = space_of(found.facts, every_rank=False)
    assert {candidate.stages * candidate.turns for candidate in space} == {2}
    best = weft.search(decoder(4), "h100x4", moves=6, fixed=base).best
    assert best.in_flight == (2, 1)
    start = Strategy(stages=4, micro_batches=4, in_flight=(4, 3, 2, 1))
    assert with_fixed(start, Strategy(stages=2)).in_flight is None
    assert with_fixed(start, Strategy(micro_batches=2)).in_flight == (4, 3, 2, 1)
    assert with_fixed(start, base).in_flight == (2, 1)
    # One stage has none: a plan of it would be refused.
    assert with_fixed(replace(start, stages=1, in_flight=(2,)), Strategy()).in_flight is None


def test_one_stage_is_fixed_too() -> None:
    """Unlike no stages at all, which leave their number to the search."""
    found = begun(decoder(4), "h100x4", base=Strategy(stages=1))
    space = space_of(found.facts, every_rank=False)
    assert {candidate.stages for candidate in space} == {1}
    free = space_of(begun(decoder(4), "h100x4").facts, every_rank=False)
    assert {candidate.stages for candidate in free} == {1, 2, 4}
    best = weft.search(decoder(4), "flexflow-k80x4", moves=3, fixed=Strategy(stages=1)).best
    assert best.stages == 1


def test_a_layout_of_all_parameters_holds() -> None:
    """Candidates of data parallelism lay all parameters out themselves, but for what is fixed."""
    fixed = Strategy(parameters={"*": weft.split(0)})
    found = begun(layers(), "h100x2", base=fixed)
    space = space_of(found.facts, every_rank=False)
    for candidate in space:
        strategy = candidate.strategy(found.facts.linears, fixed, None)
        assert strategy.parameters["*"] == weft.split(0)


@pytest.mark.parametrize(
    ("samples", "topology", "fixed"),
    [
        (6, "h100x2", Strategy(micro_batches=3)),  # no power of two
        (8, "h100x4", Strategy(grid=(3,))),  # no divisor of the devices
        (8, "h100x4", Strategy(stages=2)),  # of a model without numbered blocks
        (8, "h100x4", Strategy(stages=3)),
        (7, "h100x4", Strategy(grid=(4,), zero=weft.Zero(1))),  # 2, 2, 2 and 1 samples
        (1, "h100x3", Strategy(grid=(3,), zero=weft.Zero(3))),  # of one rank alone
    ],
    ids=str,
)
def test_what_can_be_written_by_hand_can_be_fixed(
    samples: int, topology: str, fixed: Strategy
) -> None:
    step = job(32, samples).stored()
    found = weft.search(step, topology, moves=2, fixed=fixed, planners=0)
    best = found.best
    assert not any("in time" in why for why in found.skipped)
    for name in ("micro_batches", "stages", "zero"):
        if getattr(fixed, name) != getattr(Strategy(), name):
            assert getattr(best, name) == getattr(fixed, name)
    assert not fixed.grid or best.grid == fixed.grid
    assert weft.simulate(step, strategy=best, topology=topology).step_seconds > 0


def test_samples_that_ranks_do_not_divide_are_shared_unevenly() -> None:
    """As data parallel by hand does it; lower bounds hold, and estimates count the rank with the most."""
    found = begun(job(64, 5).stored(), "flexflow-k80x4")
    space = space_of(found.facts, every_rank=True)
    candidates = [each for each in space if each.layouts == "data" and each.stages == 1]
    assert {(each.data, each.micro_batches, each.zero) for each in candidates} == {
        (4, 1, level) for level in range(4)
    }
    for candidate in space:
        answer = found.evaluator.of(found.strategy(candidate))
        assert isinstance(answer, Measures), f"{candidate}: {answer}"
        assert least_of(found.lower_bounds, candidate) <= answer.seconds
    one = CandidateTable.of([Candidate(4)])
    assert one.unevenness(5).tolist() == [1.6]
    assert one.unevenness(8).tolist() == one.unevenness(0).tolist() == [1.0]


@pytest.mark.parametrize(
    ("fixed", "axes"),
    [
        (Strategy(parameters={"0.weight": (weft.split(0), weft.broadcast)}), {2}),
        (Strategy(batch={"x": (weft.split(0), weft.broadcast)}), {2}),
        (Strategy(signatures={"relu": ("B -> B", "B -> B")}), {2}),
        (Strategy(zero=weft.Zero(1, axis=1)), {2}),
        (Strategy(parameters={"0.weight": weft.split(0)}), {1, 2}),
    ],
    ids=["parameters", "batch", "signatures", "ZeRO", "all axes"],
)
def test_what_is_said_of_each_axis_has_a_grid_of_as_many(fixed: Strategy, axes: set[int]) -> None:
    """Others would all be refused, and the moves be used up."""
    step = job(32).stored()
    found = begun(step, "h100x4", base=fixed)
    space = space_of(found.facts, every_rank=False)
    assert {len(candidate.grid) for candidate in space} == axes
    assert {
        len(space.candidate(n).grid) - count for n, count in enumerate(space.axes.tolist())
    } == {0}
    best = weft.search(step, "h100x4", moves=1, fixed=fixed, planners=0).best
    assert len(best.grid) in axes


def test_what_no_grid_has_is_named() -> None:
    three = Strategy(parameters={"0.weight": (weft.split(0), weft.broadcast, weft.broadcast)})
    for fixed, said in ((three, "layouts on 3 axes"), (Strategy(in_flight=(3, 2, 1)), "in_flight")):
        with pytest.raises(UserError, match=rf"has all that is fixed \({said}"):
            weft.search(layers(), "h100x4", moves=1, fixed=fixed)


def test_what_cannot_be_is_refused() -> None:
    for fixed in (
        Strategy(micro_batches=5),
        Strategy(grid=(8,)),
        Strategy(stages=5),
        Strategy(micro_batches=5, grid=(4,)),
    ):
        with pytest.raises(UserError, match="no strategy on 4 or 2 or 1 ranks has all that is"):
            weft.search(layers(), "h100x4", moves=1, fixed=fixed)
    with pytest.raises(UserError, match="no strategy on 1 rank has"):
        weft.search(layers(), "h100x1", moves=1, fixed=Strategy(zero=weft.Zero(1)))
