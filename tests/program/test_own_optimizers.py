"""Optimizers of the user's own, beside plain PyTorch: what their steps read of parameters and of themselves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import weft
from single_device import assert_same_state, whole_state


class Scaled(torch.optim.Optimizer):
    """Goes as far as the parameter and the optimizer say, and only for parameters that train."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.slower = 1.0
        self.by_width = {4: 1.0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and isinstance(p, nn.Parameter) and p.requires_grad:
                    rate = group["lr"] * getattr(p, "scale", 1.0) * self.by_width.get(4, 0.0)
                    if getattr(p, "_decays", False):
                        p.mul_(0.9)
                    p.sub_(p.grad, alpha=rate / self.slower)


def loss_fn(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


@pytest.mark.parametrize(
    ("grid", "strategy"),
    [
        ([0, 1, 2], weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3))),
        ([0, 1], weft.Strategy(stages=2, micro_batches=2)),
        ([0], weft.Strategy()),
    ],
)
def test_attributes_of_parameters_and_optimizer(grid: list[int], strategy: weft.Strategy) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    plain = copy.deepcopy(model)
    both: list[Any] = [model, plain]
    made = [Scaled(each.parameters()) for each in both]
    for each in both:
        each[0].weight.scale, each[2].bias._decays = 3.0, True
    batch = torch.randn(6, 4, dtype=torch.float64)
    with weft.local_world(len(grid)):
        program = weft.compile(
            model,
            loss_fn,
            made[0],
            batch,
            placement=weft.placement("cpu", grid),
            strategy=strategy,
        )
        for number in range(4):
            made[1].zero_grad()
            loss_fn(plain, batch).backward()
            made[1].step()
            program.step(batch)
            assert_same_state(whole_state(model), plain.state_dict())
            for each, optimizer in zip(both, made, strict=True):
                each[0].weight.scale = number + 0.5
                optimizer.slower += 1.0
                optimizer.by_width[4] = 1.0 / (number + 1)
        program.verify(batch)
        program.close()


def test_masters_of_an_optimizer_of_the_users() -> None:
    torch.manual_seed(0)
    model: Any = nn.Linear(4, 4, bias=False).bfloat16()
    model.weight.scale = 2.0
    optimizer = Scaled(model.parameters())
    batch = torch.randn(4, 4).bfloat16()
    weight = model.weight.detach().float().requires_grad_()
    with weft.local_world(2):
        program = weft.compile(
            model,
            lambda model, batch: model(batch).float().square().sum(),
            optimizer,
            batch,
            placement=weft.placement("cpu", [0, 1]),
            strategy=weft.Strategy(precision=weft.Precision(masters=True)),
        )
        program.step(batch)
        loss = (batch.float() @ weight.T).square().sum()
        (gradient,) = torch.autograd.grad(loss, weight)
        expected = weight - 0.2 * gradient
        found = program.full_state_dict(masters=True)["weight"]
        assert found.dtype == torch.float32
        torch.testing.assert_close(found, expected.detach(), rtol=0.05, atol=0.05)
        assert torch.equal(program.full_state_dict()["weight"], found.bfloat16())
        program.close()
