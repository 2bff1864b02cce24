"""The least sum of calls and boxing: as deduction finds it along one axis, for all strategies of a grid, and met."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

import weft
from search.jobs import begun, loss
from search.machines import TWO_KINDS
from weft.compiler.layouts.box import deduce
from weft.hardware.costs import carried, seconds_model
from weft.planning.stored_step import StoredStep
from weft.search.additive import AdditivePart, additive_part
from weft.search.state import SearchState

split, broadcast = weft.split, weft.broadcast
WIDE = weft.Strategy(batch={"*": (split(0), broadcast)}, grid=(2, 2))
COLUMNS = {"0.weight": (broadcast, split(0)), "2.weight": (broadcast, split(1))}
STRATEGIES = (
    WIDE,
    replace(WIDE, parameters=COLUMNS),
    replace(WIDE, batch={"*": (split(0), split(0))}),
    replace(WIDE, parameters={"*.weight": (split(0), broadcast)}),
    replace(WIDE, micro_batches=2),
)


@cache
def step(width: int = 4096, samples: int = 4096) -> StoredStep:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, 16))
        batch = {"x": torch.zeros(samples, width), "y": torch.zeros(samples, dtype=torch.int64)}
    return weft.Job(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch).stored()


def part(found: SearchState, strategy: weft.Strategy) -> AdditivePart:
    deduced = found.evaluator.compiled(strategy).deduced
    made = additive_part(found.facts, strategy, deduced)
    assert made is not None
    return made


def test_one_axis_is_as_deduction_in_seconds_finds_it() -> None:
    found = begun(step(), "h100x4")
    strategy = weft.Strategy(batch={"*": split(0)}, grid=(4,))
    solved = found.evaluator.compiled(strategy).deduced[0]
    model = seconds_model(found.facts.machine.costs, (0, 1, 2, 3))
    free = replace(solved.hints, inputs={})
    best = deduce(solved.graph, free, solved.placement, model)
    assert best.proven
    # Deduction charges a collective for each of the four parameters that it splits, so that ties go to whole ones.
    ties = 4 * model.bytes_per_collective
    least = part(found, strategy).least * carried(found.facts.machine.costs, (0, 1, 2, 3))
    assert ties < 0.05 * least
    assert least <= best.cost <= least + ties


def test_the_least_is_that_of_the_grid_and_no_strategy_is_below() -> None:
    found = begun(step(), "h100x4")
    parts = [part(found, strategy) for strategy in STRATEGIES[:4]]
    assert len({round(each.least / parts[0].least, 9) for each in parts}) == 1
    assert all(each.cost >= each.least * (1 - 1e-9) for each in parts)
    assert max(each.gap for each in parts) > 0.1


@pytest.mark.parametrize("strategy", STRATEGIES[:4])
def test_the_cheapest_layouts_meet_it(strategy: weft.Strategy) -> None:
    found = begun(step(), "h100x4")
    before = part(found, strategy)
    cheapest = part(found, before.cheapest)
    assert cheapest.cost == pytest.approx(before.least, rel=1e-9)
    assert cheapest.gap < 1e-9


def test_between_micro_batches_planning_has_calls_of_its_own() -> None:
    found = begun(step(), "h100x4")
    before = part(found, STRATEGIES[4])
    cheapest = part(found, before.cheapest)
    assert before.least <= cheapest.cost < before.cost


def test_what_is_fixed_stays() -> None:
    fixed = weft.Strategy(parameters={"0.weight": (split(1), split(0))})
    free, held = begun(step(), "h100x4"), begun(step(), "h100x4", base=fixed)
    strategy = replace(WIDE, parameters=fixed.parameters)
    one, other = part(free, strategy), part(held, strategy)
    assert other.least > one.least
    assert other.cheapest.parameters["0.weight"] == (split(1), split(0))
    assert part(held, other.cheapest).cost == pytest.approx(other.least, rel=1e-9)


def test_stages_and_shards_count() -> None:
    found = begun(step(), "h100x8")
    staged = weft.Strategy(
        batch={"*": split(0)}, stages=2, micro_batches=4, zero=weft.Zero(1), grid=(8,)
    )
    made = part(found, staged)
    assert 0 <= made.gap < 1
    assert made.least > 0


def test_results_say_it() -> None:
    result = weft.search(step(), "h100x4", moves=20)
    assert result.additive is not None
    assert f"others in this grid save {result.additive.gap:.2%} of calls" in str(result)
    assert result.to_json()["additive_gap"] == result.additive.gap


def test_stages_of_unlike_devices_count_in_seconds() -> None:
    """Each by the rates of its own devices: the same halves take longer where one is on the slow pair."""
    both = weft.Strategy(batch={"*": split(0)}, grid=(4,), stages=2, micro_batches=2)
    mixed, slow = TWO_KINDS, replace(TWO_KINDS, groups=TWO_KINDS.groups[1:] * 2)
    quick = replace(TWO_KINDS, groups=TWO_KINDS.groups[:1] * 2)
    least = [part(begun(step(), machine), both).least for machine in (quick, mixed, slow)]
    assert least[0] < least[1] < least[2]
