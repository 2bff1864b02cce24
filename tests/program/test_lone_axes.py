"""Steps on grids of many axes of one rank: planned as on one axis, in as little time and memory."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import weft
from models import GPT, token_batch, token_loss
from single_device import adamw, plain_training

# Once 85 s and 19 GB on four axes; it takes a second.
pytestmark = pytest.mark.timeout(60)


def nested(axes: int) -> list[Any]:
    grid: Any = 0
    for _ in range(axes):
        grid = [grid]
    return grid


@pytest.mark.parametrize("axes", [4, 32])
def test_a_step_on_axes_of_one_rank(axes: int) -> None:
    torch.manual_seed(0)
    model = GPT().double()
    batches = [token_batch(4, seed=seed) for seed in range(2)]
    expected, _ = plain_training(model, token_loss, batches, make_optimizer=adamw)
    ranks = weft.placement("cpu", nested(axes))
    with weft.local_world(1):
        program = weft.compile(model, token_loss, adamw(model), batches[0], placement=ranks)
        found = [program.step(batch).item() for batch in batches]
        program.close()
    assert found == pytest.approx(expected, rel=1e-9)
