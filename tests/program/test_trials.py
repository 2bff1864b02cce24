"""Strategies that run for real before one is taken: they leave model, optimizer and batch as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import weft
from weft.errors import RuleError, StrategyError
from weft.layout import Placement
from weft.program.planning.step import Step
from weft.program.trials import Trials
from weft.runtime.world.world import local_world
from weft.strategy.strategy import Strategy, data_parallel

TWO = Placement("cpu", (2,), (0, 1))
SHARDED = weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3))


class Net(nn.Module):
    """Buffers that a step writes, a mask that it reads, and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = (
            nn.Linear(6, 8, bias=False),
            nn.BatchNorm1d(8),
            nn.Linear(8, 4),
        )
        self.register_buffer("mask", torch.tensor([True, False] * 4))

    def forward(self, x):
        return self.last(torch.relu(self.norm(self.first(x))) * self.mask)


def loss(model, batch):
    return cross_entropy(model(batch["x"]), batch["y"])


def parts(device="cpu"):
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 6), "y": torch.randint(0, 4, (8,))}
    with torch.device(device):
        model = Net()
    return model, loss, torch.optim.AdamW(model.parameters(), lr=0.1), batch


@pytest.mark.parametrize("strategy", [data_parallel(), SHARDED], ids=["data", "zero 3"])
def test_a_trial_changes_nothing(strategy):
    model, loss_fn, optimizer, batch = parts()
    before = copy.deepcopy((model.state_dict(), batch))
    with local_world(2) as world:
        trials = Trials(world, Step(model, loss_fn, optimizer, batch), "aten")
        assert 0 < trials.seconds(strategy, TWO) < 1
    torch.testing.assert_close((model.state_dict(), batch), before, rtol=0, atol=0)
    assert not optimizer.state
    assert all(type(each) is nn.Parameter for each in model.parameters())
    loss_fn(model, batch).backward()


def test_a_model_without_values_can_be_tried():
    model, loss_fn, optimizer, batch = parts("meta")
    meta = {name: leaf.to("meta") for name, leaf in batch.items()}
    with local_world(2) as world:
        assert (
            Trials(world, Step(model, loss_fn, optimizer, meta), "aten").seconds(SHARDED, TWO) > 0
        )
    assert all(each.is_meta for each in model.parameters())


def test_the_fastest_is_taken_and_the_first_of_equals(monkeypatch):
    took = {1: 3.0, 2: 1.0, 3: RuleError("no rule"), 4: 1.0}

    def seconds(self, strategy, placement):
        found = took[strategy.micro_batches]
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(Trials, "seconds", seconds)
    candidates = [(Strategy(micro_batches=number), TWO) for number in took]
    with local_world(2) as world:
        trials = Trials(world, Step(*parts()), "aten")
        assert trials.fastest(candidates) == candidates[1]
        with pytest.raises(RuleError, match="no rule"):
            trials.fastest(candidates[2:3])


def test_what_disturbs_one_trial_decides_nothing(monkeypatch):
    took = {1: iter([1.1, 0.9]), 2: iter([1.0, 1.0]), 3: iter([1.3])}
    monkeypatch.setattr(
        Trials, "seconds", lambda _, strategy, __: next(took[strategy.micro_batches])
    )
    candidates = [(Strategy(micro_batches=number), TWO) for number in took]
    with local_world(2) as world:
        trials = Trials(world, Step(*parts()), "aten")
        assert trials.fastest(candidates) == candidates[0]
    assert [next(each, "all taken") for each in took.values()] == ["all taken"] * 3


@pytest.mark.parametrize(("again", "taken"), [(1.001, 1), (1.06, 0)])
def test_of_what_trials_do_not_tell_apart_the_first_is_taken(monkeypatch, again, taken):
    """The second is 2 % faster: that counts where trials come out alike, not where they differ by 6 %."""
    took = {1: iter([1.0, again]), 2: iter([0.98, 0.98 * again])}
    monkeypatch.setattr(
        Trials, "seconds", lambda _, strategy, __: next(took[strategy.micro_batches])
    )
    candidates = [(Strategy(micro_batches=number), TWO) for number in took]
    with local_world(2) as world:
        trials = Trials(world, Step(*parts()), "aten")
        assert trials.fastest(candidates) == candidates[taken]


def test_a_search_that_measures_equals_plain_pytorch():
    model, loss_fn, optimizer, batch = parts()
    plain, plainly = copy.deepcopy((model, optimizer))
    auto = weft.Auto(moves=4, measure=2, fixed=Strategy(clip_norm=1.0))
    with local_world(2):
        program = weft.compile(model, loss_fn, optimizer, batch, placement=TWO, strategy=auto)
        assert program.strategy.clip_norm == 1.0
        for _ in range(3):
            expected = loss_fn(plain, batch)
            expected.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            plainly.step()
            plainly.zero_grad()
            torch.testing.assert_close(program.step(batch), expected.detach())
        state = program.full_state_dict()
        program.close()
    torch.testing.assert_close(state, plain.state_dict())


@pytest.mark.parametrize("measure", [-1, 1.5, True, "3"])
def test_a_wrong_number_to_measure_is_refused(measure):
    with local_world(1), pytest.raises(StrategyError, match="measure takes the number"):
        weft.compile(
            *parts(), placement=Placement("cpu", (1,), (0,)), strategy=weft.Auto(measure=measure)
        )
