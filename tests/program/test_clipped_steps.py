"""Gradients clipped by their global norm: the steps of plain PyTorch with `clip_grad_norm_`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, classification_loss, token_batch, token_loss
from single_device import assert_same_state, assert_same_training, compiled, plain_training

pytestmark = pytest.mark.usefixtures("double_precision")

MAX_NORM = 0.3
S, B = weft.split, weft.broadcast
COLUMNS, ROWS = ("blocks.*.qkv", "blocks.*.up"), ("blocks.*.proj", "blocks.*.down")
LINEARS = weft.hybrid_parallel(COLUMNS, ROWS).parameters

STRATEGIES: dict[str, tuple[Any, weft.Strategy]] = {
    "data parallel": (
        [0, 1],
        weft.Strategy(batch={"*": S(0)}, parameters={"*": B}, clip_norm=MAX_NORM),
    ),
    "all deduced": ([0, 1, 2, 3], weft.Strategy(clip_norm=MAX_NORM)),
    "hybrid on a grid": (
        [[0, 1], [2, 3]],
        weft.Strategy(batch={"*": (S(0), B)}, parameters=LINEARS, clip_norm=MAX_NORM),
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_clipped_steps(name: str) -> None:
    grid, strategy = STRATEGIES[name]
    torch.manual_seed(0)
    model = GPT()
    batches = [token_batch(4, seed=seed) for seed in range(3)]
    norms = []

    def clip(held: list[torch.Tensor]) -> None:
        norms.append(nn.utils.clip_grad_norm_(held, MAX_NORM).item())

    expected = plain_training(model, token_loss, batches, clip)
    assert min(norms) > MAX_NORM  # each step is clipped
    with compiled(model, token_loss, batches[0], grid, strategy) as program:
        assert_same_training(program, batches, expected)


def test_data_parallel_gradients_are_reduced_once() -> None:
    """The norm and the update read the same sums; the norm itself costs no communication."""
    batch = token_batch(4)
    boxings = []
    for max_norm in (None, MAX_NORM):
        strategy = weft.Strategy(batch={"*": S(0)}, parameters={"*": B}, clip_norm=max_norm)
        with compiled(GPT(), token_loss, batch, [0, 1], strategy) as program:
            boxings.append(program.explain(details=True).split("kinds, ")[1].split(" a step")[0])
    assert boxings[0] == boxings[1]


@pytest.mark.parametrize("max_norm", [0.05, 1e6])
def test_only_what_the_optimizer_updates_counts(max_norm: float) -> None:
    """Plain descent, whose steps show the size of a gradient: one step is clipped, one is not."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 4))
    batch = {"x": 100 * torch.randn(8, 8), "y": torch.randint(4, (8,))}
    plain = copy.deepcopy(model)
    optimizer = torch.optim.SGD(plain[1].parameters(), lr=0.1)
    classification_loss(plain, batch).backward()
    nn.utils.clip_grad_norm_(plain[1].parameters(), max_norm)
    optimizer.step()
    with weft.local_world(2):
        program = weft.compile(
            model,
            classification_loss,
            torch.optim.SGD(model[1].parameters(), lr=0.1),
            batch,
            placement=weft.placement("cpu", [0, 1]),
            strategy=weft.Strategy(batch={"*": S(0)}, clip_norm=max_norm),
        )
        program.step(batch)
        assert_same_state(program.full_state_dict(), plain.state_dict())
        program.close()
