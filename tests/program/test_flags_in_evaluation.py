"""Evaluation functions that ask which parameters require a gradient find what the model says."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import weft

STRATEGIES = {
    "data": None,
    "zero": weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3)),
    "stages": weft.Strategy(stages=2, micro_batches=2),
}


def penalty(model: nn.Module, batch: torch.Tensor) -> Any:
    made = model(batch)
    assert not made.requires_grad
    return made.sum() + sum(
        each.square().sum() for each in model.parameters() if each.requires_grad
    )


def norm_of_gradients(model: nn.Module, batch: torch.Tensor) -> Any:
    with torch.enable_grad():
        trained = [each for each in model.parameters() if each.requires_grad]
        return sum(g.square().sum() for g in torch.autograd.grad(model(batch).sum(), trained))


@pytest.mark.parametrize("function", [penalty, norm_of_gradients])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_flags_are_those_of_the_model_and_are_watched(strategy: str, function: Any) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    model[0].requires_grad_(False)
    plain, batch = copy.deepcopy(model), torch.randn(8, 6, dtype=torch.float64)
    with weft.local_world(2):
        program = weft.compile(
            model,
            lambda model, batch: model(batch).square().mean(),
            torch.optim.SGD(model.parameters(), lr=0.1),
            batch,
            placement=weft.placement("cpu", [0, 1]),
            strategy=STRATEGIES[strategy],
        )
        evaluation = program.evaluation(function, batch)
        for trained in (False, True):
            model[0].requires_grad_(trained)
            plain[0].requires_grad_(trained)
            with torch.no_grad():
                expected = function(plain, batch)
            torch.testing.assert_close(evaluation.step(batch), expected.detach())
        program.close()
