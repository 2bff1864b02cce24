"""What differs between two strategies, and what each difference costs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import weft
from models import GPT, token_batch, token_loss
from weft.cli.main import app
from weft.errors import UserError
from weft.planning.differences import differences
from weft.planning.stored_step import StoredStep

FIRST = weft.data_parallel()
SECOND = replace(FIRST, micro_batches=4, zero=weft.Zero(1), recompute=("blocks.*",))


@pytest.fixture(scope="module")
def step() -> StoredStep:
    torch.manual_seed(0)
    model = GPT(layers=2)
    optimizer = torch.optim.AdamW(model.parameters())
    return weft.Job(model, token_loss, optimizer, token_batch(n=16)).stored()


def test_each_difference_is_that_entry_alone(step: StoredStep) -> None:
    found = differences(step, FIRST, SECOND, "h100x4")
    assert found.first == weft.simulate(step, FIRST, "h100x4")
    assert found.second == weft.simulate(step, SECOND, "h100x4")
    assert [each.name for each in found.entries] == ["micro_batches", "zero", "recompute"]
    for each in found.entries:
        other = replace(FIRST, **{each.name: getattr(SECOND, each.name)})
        assert each.seconds == weft.simulate(step, other, "h100x4").step_seconds
    assert (found.entries[0].first, found.entries[0].second) == ("1", "4")
    assert "recompute: [] -> [blocks.*]\n    by itself " in str(found)


def test_patterns_of_zero_and_micro_batches_in_flight_are_entries(step: StoredStep) -> None:
    """Patterns in another order are another entry; what no stage of the first one can hold says so."""
    one = {"*.bias": None, "*": weft.Zero(3)}
    first = replace(FIRST, zero=one)
    second = replace(FIRST, zero=dict(reversed(one.items())), in_flight=(2, 1))
    second = replace(second, stages=2, micro_batches=4)
    by_name = {each.name: each for each in differences(step, first, second, "h100x4").entries}
    zero, given = by_name["zero"], by_name["in_flight"]
    assert zero.first == "{'*.bias': null, '*': {level: 3, axis: 0}}"
    every = weft.simulate(step, replace(FIRST, zero=weft.Zero(3)), "h100x4").step_seconds
    assert zero.seconds == every
    assert (given.first, given.second, given.seconds) == ("null", "[2, 1]", None)
    assert "there is one stage" in given.why


def test_equal_strategies_do_not_differ(step: StoredStep) -> None:
    found = differences(step, FIRST, weft.data_parallel(), "h100x4")
    assert found.entries == ()
    assert found.first == found.second
    assert str(found).endswith("the strategies do not differ")


def test_an_entry_that_needs_others_says_so(step: StoredStep) -> None:
    """A limit that only shards keep."""
    shards = replace(FIRST, zero=weft.Zero(3))
    whole, less = (weft.simulate(step, each, "h100x4").memory for each in (FIRST, shards))
    assert whole is not None
    assert less is not None
    second = replace(shards, memory_limit=(whole.planned + less.planned) // 2)
    by_name = {each.name: each for each in differences(step, FIRST, second, "h100x4").entries}
    assert by_name["memory_limit"].seconds is None
    assert by_name["memory_limit"].why.endswith("(with zero, perhaps)")


def test_a_strategy_that_does_not_fit_is_refused(step: StoredStep) -> None:
    with pytest.raises(UserError, match="stages"):
        differences(step, FIRST, replace(FIRST, stages=8), "h100x4")


def test_the_command(step: StoredStep, tmp_path: Path) -> None:
    step.save(tmp_path / "a.graph")
    FIRST.save(tmp_path / "one.yaml")
    SECOND.save(tmp_path / "two.yaml")
    files = [str(tmp_path / name) for name in ("one.yaml", "two.yaml", "a.graph")]
    arguments = ["diff", *files[:2], "--graph", files[2], "--topology", "h100x4"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    assert done.output.startswith("first:  ")
    content = json.loads(CliRunner().invoke(app, [*arguments, "--json"]).output)
    assert [each["name"] for each in content["entries"]] == ["micro_batches", "zero", "recompute"]
