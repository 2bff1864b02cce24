"""Modules that a step moves or casts: where nothing changes it may, else it is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from weft.capture import Captured, capture
from weft.errors import CaptureError

OUTSIDE = nn.Linear(4, 4)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.cells = nn.LSTM(4, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.layer(x)).square().mean()


def assigned(model: Any, batch: torch.Tensor) -> None:
    model.layer = model.layer.to(batch.device)


KEPT: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "device": lambda model, batch: model.layer.to(batch.device),
    "dtype": lambda model, batch: model.layer.to(torch.float32),
    "like": lambda model, batch: model.to(batch),
    "float": lambda model, batch: model.float(),
    "cpu": lambda model, batch: model.cpu(),
    "assigned": assigned,
    "cells": lambda model, batch: model.cells.to(batch.device),
    "outside": lambda model, batch: OUTSIDE.to(batch.device),
}
MOVED: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "double": lambda model, batch: model.double(),
    "norm": lambda model, batch: model.norm.bfloat16(),
    "device": lambda model, batch: model.layer.to("meta"),
    "empty": lambda model, batch: model.layer.to_empty(device="cpu"),
    "outside": lambda model, batch: OUTSIDE.half(),
}


def captured(move: Callable[[Any, torch.Tensor], Any]) -> Captured:
    def loss(model: nn.Module, batch: torch.Tensor) -> Any:
        move(model, batch)
        return model(batch)

    model = Net()
    return capture(model, loss, torch.optim.SGD(model.parameters()), torch.ones(2, 4))


@pytest.mark.parametrize("move", KEPT.values(), ids=KEPT)
def test_where_nothing_changes(move: Callable[[Any, torch.Tensor], Any]) -> None:
    assert captured(move).graph == captured(lambda model, batch: None).graph


def test_a_module_that_the_step_makes() -> None:
    captured(lambda model, batch: nn.Linear(4, 4).to(batch.device))


@pytest.mark.parametrize("move", MOVED.values(), ids=MOVED)
def test_where_it_changes(move: Callable[[Any, torch.Tensor], Any]) -> None:
    with pytest.raises(CaptureError, match=r"test_moves[\s\S]*moves or casts a module, \w+ \("):
        captured(move)
    assert next(OUTSIDE.parameters()).dtype == torch.float32
