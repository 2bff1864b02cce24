"""Every optimizer of torch.optim on distributed modules, against the same on plain ones."""

# To mypy, global tensors are torch's, without `full` and `sbp`.
# mypy: disable-error-code="attr-defined, call-arg"

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft

S, B = weft.split, weft.broadcast
OPTIMIZERS = {
    name: kind
    for name, kind in vars(torch.optim).items()
    if inspect.isclass(kind) and issubclass(kind, torch.optim.Optimizer)
    if name not in ("Optimizer", "SparseAdam")  # for sparse gradients alone
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    "Adam": {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1},
    "RMSprop": {"lr": 0.005, "momentum": 0.5, "centered": True},
    "LBFGS": {"max_iter": 3, "line_search_fn": "strong_wolfe"},
    "ASGD": {"t0": 1},
}
LAYOUTS = {
    "whole": ([0, 1], {}, S(0)),
    "split": ([0, 1], {"0.*": S(0), "2.weight": S(1)}, B),
    "grid": ([[0, 1], [2, 3]], {"0.*": (B, S(0)), "2.weight": (S(0), S(1))}, (S(0), B)),
}


def train(model: nn.Module, x: Any, y: Any, make: Any) -> list[float]:
    # Muon is for matrices alone.
    parameters = [p for p in model.parameters() if p.dim() == 2 or "Muon" not in make.__name__]
    optimizer = make(parameters, **OPTIONS.get(make.__name__, {"lr": 0.05}))
    losses = []

    def closure() -> Any:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        return loss

    for _ in range(3):
        losses.append(optimizer.step(closure).item())
    return losses


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_trains_distributed_modules(name: str, layout: str) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x, y = torch.randn(7, 5).double(), torch.randn(7, 3).double()
    grid, patterns, sbp = LAYOUTS[layout]
    with weft.local_world(4):
        placement = weft.placement("cpu", grid)
        model = weft.distribute(copy.deepcopy(plain), placement, patterns)
        batch = [weft.tensor(part, placement=placement, sbp=sbp) for part in (x, y)]
        found = train(model, *batch, OPTIMIZERS[name])
        expected = train(plain, x, y, OPTIMIZERS[name])
        assert expected[0] > expected[-1]
        # Muon computes its directions in bfloat16.
        loose = {"rtol": 1e-2, "atol": 5e-3} if name == "Muon" else {"rtol": 1e-6, "atol": 1e-8}
        torch.testing.assert_close(found, expected, **loose)
        for (key, ours), theirs in zip(model.named_parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(ours.full(), theirs, msg=key, **loose)
