"""Random ops draw by global position: the same masks on one rank, two or four, in any layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, token_batch, token_loss
from weft.layout import Placement

S, B = weft.split, weft.broadcast
BATCHES = [token_batch(4, seed=seed) for seed in range(3)]


def losses_with_dropout(
    placement: Placement, strategy: weft.Strategy, seed: int = 7, probability: float = 0.3
) -> list[float]:
    torch.manual_seed(0)
    model = GPT(dropout=probability).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    with weft.local_world(len(placement.ranks)):
        program = weft.compile(
            model,
            token_loss,
            optimizer,
            BATCHES[0],
            placement=placement,
            strategy=strategy,
            seed=seed,
        )
        return [program.step(batch).item() for batch in BATCHES]


ON_ONE = losses_with_dropout(weft.placement("cpu", [0]), weft.data_parallel())


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("grid", "strategy"),
    [
        ([0, 1], weft.data_parallel()),
        ([0, 1, 2, 3], weft.data_parallel()),
        ([0, 1], weft.tensor_parallel(["blocks.*.up"], ["blocks.*.down"])),
        ([[0, 1], [2, 3]], weft.hybrid_parallel(["blocks.*.up"], ["blocks.*.down"])),
        ([0, 1], weft.Strategy(batch={"*": S(1)})),
    ],
    ids=["data 2", "data 4", "tensor 2", "hybrid 4", "sequence 2"],
)
def test_dropout_is_the_same_in_every_layout(grid: Any, strategy: weft.Strategy) -> None:
    found = losses_with_dropout(weft.placement("cpu", grid), strategy)
    assert found == pytest.approx(ON_ONE, rel=1e-10)


@pytest.mark.timeout(60)
def test_the_seed_and_the_step_decide() -> None:
    one = weft.placement("cpu", [0])
    assert losses_with_dropout(one, weft.data_parallel()) == ON_ONE
    assert losses_with_dropout(one, weft.data_parallel(), seed=8) != ON_ONE
    assert losses_with_dropout(one, weft.data_parallel(), probability=0.0) != ON_ONE


class Noise(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.randn_like(x) + torch.rand(x.shape, dtype=x.dtype)


@pytest.mark.timeout(60)
def test_every_step_and_every_op_draws_anew() -> None:
    def both(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        return model(batch["x"]), model(batch["x"])

    batch = {"x": torch.zeros(6, 5)}
    with weft.local_world(2):
        program = weft.compile(
            Noise(), both, None, batch, placement=weft.placement("cpu", [0, 1]), seed=3
        )
        (a, b), (c, _) = program.step(batch), program.step(batch)
    assert not torch.equal(a, b)
    assert not torch.equal(a, c)
    assert len(a.unique()) == a.numel()
