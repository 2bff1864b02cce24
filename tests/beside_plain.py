"""Steps with weft and the same in plain PyTorch, side by side, from one model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import weft
from single_device import assert_same_state, whole_state


def squares(model: nn.Module, batch: torch.Tensor) -> Any:
    return model(batch).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01)


def compiled(model: nn.Module, loss_fn: Any = squares) -> weft.Program:
    ranks = weft.placement("cpu", [0, 1])
    return weft.compile(model, loss_fn, sgd(model), torch.ones(8, 8), placement=ranks)


class Both:
    """A step with weft and the same in plain PyTorch, from one model."""

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any = squares,
        make_optimizer: Callable[[Any], torch.optim.Optimizer] = sgd,
    ) -> None:
        self.model, self.plain = model, copy.deepcopy(model)
        self.loss_fn = loss_fn
        self.optimizer, self.other = make_optimizer(model), make_optimizer(self.plain)
        ranks = weft.placement("cpu", [0, 1])
        self.program = weft.compile(
            model, loss_fn, self.optimizer, torch.ones(8, 8), placement=ranks
        )

    def step(self, size: int = 8) -> None:
        """One more step of both: the losses and the models agree."""
        batch = torch.arange(8.0 * size).reshape(size, 8) / (8 * size)
        self.other.zero_grad()
        expected = self.loss_fn(self.plain, batch)
        expected.backward()
        self.other.step()
        found = self.program.step(batch)
        torch.testing.assert_close(found, expected.detach(), rtol=1e-5, atol=1e-7)
        assert_same_state(whole_state(self.model), self.plain.state_dict(), 1e-5)

    def change(self, change: Callable[[Any], Any]) -> None:
        for model in (self.model, self.plain):
            change(model)
