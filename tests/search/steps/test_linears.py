"""Linear layers are cut in turn: those of blocks, else all."""

from __future__ import annotations

import torch
from torch import nn

import weft
from search.jobs import decoder, loss
from weft.search.steps.linears import linears_of


def test_linears_of_blocks() -> None:
    found = linears_of(decoder())
    assert found.columns
    assert found.rows
    assert all(pattern.startswith("blocks.*.") for pattern in (*found.columns, *found.rows))


def test_blocks_without_linears_leave_those_behind() -> None:
    """As AlexNet has them: numbered convolutions, then linear layers outside of these."""
    features = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Conv2d(2, 2, 3), nn.Flatten())
    model = nn.Sequential()
    model.add_module("features", features)
    model.add_module("first", nn.Linear(32, 16))
    model.add_module("relu", nn.ReLU())
    model.add_module("last", nn.Linear(16, 4))
    batch = {"x": torch.zeros(4, 1, 8, 8), "y": torch.zeros(4, dtype=torch.int64)}
    step = weft.Job(model, loss, torch.optim.SGD(model.parameters()), batch).stored()
    found = linears_of(step)
    assert (found.columns, found.rows) == (("first",), ("last",))
    assert found.cuts == {"first": "columns", "last": "rows"}


def test_a_model_without_linears_has_none() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten())
    batch = {"x": torch.zeros(4, 1, 4, 4), "y": torch.zeros(4, dtype=torch.int64)}
    step = weft.Job(model, loss, torch.optim.SGD(model.parameters()), batch).stored()
    assert not linears_of(step)
