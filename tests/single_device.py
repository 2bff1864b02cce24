"""Plain PyTorch training on one device, and the same by weft, for tests that compare the two."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import weft

# Runs between backward and the optimizer's step.
Clip = Callable[[list[torch.Tensor]], Any]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    """With a large eps: some gradients are zero but for rounding, and Adam would divide it by itself."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def plain_training(
    model: nn.Module,
    loss_fn: Any,
    batches: list[Any],
    clip: Clip | None = None,
    make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and the final state of ordinary training."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = loss_fn(model, batch)
        loss.backward()
        if clip is not None:
            clip([p for group in optimizer.param_groups for p in group["params"]])
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


@contextmanager
def compiled(
    model: nn.Module, loss_fn: Any, batch: Any, grid: Any, strategy: weft.Strategy, seed: int = 0
) -> Iterator[weft.Program]:
    """The program of one step in a local world; for a copy of the model, which stays as it is."""
    model = copy.deepcopy(model)
    with weft.local_world(torch.tensor(grid).numel()):
        program = weft.compile(
            model,
            loss_fn,
            adamw(model),
            batch,
            placement=weft.placement("cpu", grid),
            strategy=strategy,
            seed=seed,
        )
        yield program
        program.close()


def processes() -> int:
    """How many processes hold the ranks: in a local world one."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def is_first() -> bool:
    """True in the process that has rank 0, which writes files of all."""
    return os.environ.get("RANK", "0") == "0"


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A live tensor, or an ordinary one, as an ordinary whole one; on every process, which all call it."""
    if not isinstance(tensor, weft.GlobalTensor):
        return tensor.detach()
    found: Any = tensor.detach()
    if processes() > 1:
        every = weft.placement("cpu", range(processes()))
        found = found.to_global(placement=every, sbp=weft.broadcast)
    full: torch.Tensor = found.full()
    return full


def whole_state(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a live model's `state_dict()` holds, whole."""
    return {name: whole(value) for name, value in model.state_dict().items()}


def assert_same_training(
    program: weft.Program, batches: list[Any], expected: tuple[list[float], Any]
) -> None:
    """Losses and state agree to 1e-10."""
    losses, state = expected
    assert [program.step(batch).item() for batch in batches] == pytest.approx(losses, rel=1e-10)
    assert_same_state(program.full_state_dict(), state)


def assert_same_state(
    found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], tolerance: float = 1e-10
) -> None:
    """Every tensor agrees, relative to its largest element."""
    assert list(found) == list(expected)
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-30)
        difference = ((found[name] - value).abs().max() / scale).item()
        assert difference <= tolerance, f"{name} differs by {difference:.1e}"
