"""Runs of parameters: from one unit on, or up to one; those first that save most."""

from __future__ import annotations

import weft
from search.jobs import begun, decoder
from weft.search.moves.layouts import Weight, runs_of
from weft.search.moves.stages import StageMoves
from weft.strategy.strategy import Strategy

WEIGHTS = [
    Weight("0.weight", (8, 8, 3, 3), 0, -5),
    Weight("0.bias", (8,), 0, 0),
    Weight("1.weight", (16, 8, 3, 3), 1, 10),
    Weight("2.weight", (16, 8, 1, 1), 2, 20),
]


def test_the_first_run_is_the_one_that_saves_most_and_leaves_out_what_costs() -> None:
    runs = runs_of(WEIGHTS, {})
    assert [each.key for each in runs[0].weights] == ["1.weight", "2.weight"]
    keys = [tuple(each.key for each in run.weights) for run in runs]
    assert ("0.weight", "1.weight") in keys
    assert ("0.weight", "0.bias", "1.weight", "2.weight") in keys
    assert len(set(keys)) == len(keys)


def test_layouts_are_those_that_all_of_a_run_can_have() -> None:
    run = runs_of(WEIGHTS, {})[0]
    start = Strategy(parameters={"*": weft.broadcast})
    found = [move.on(start) for move in run.moves((8,), {})]
    assert found[0] == start
    assert [each.parameters["1.weight"] for each in found[1:]] == [weft.split(0), weft.split(1)]
    assert list(found[1].parameters)[-1] == "*"
    assert len(list(run.moves((4, 2), {}))) == 9


def test_what_is_fixed_is_in_no_run() -> None:
    runs = runs_of(WEIGHTS, {"2.*": weft.broadcast})
    assert all(each.key != "2.weight" for run in runs for each in run.weights)


def test_runs_of_a_step_are_along_its_units() -> None:
    found = begun(decoder(), "h100x4")
    runs = StageMoves(found.facts, found.evaluator).runs
    saved = [each.saved for each in runs]
    assert runs
    assert saved == sorted(saved, reverse=True)
    assert any(len({each.unit for each in run.weights}) > 1 for run in runs)
