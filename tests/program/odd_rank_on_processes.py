"""Ranks of which one is given another batch than the others, as ranks on GPUs would be: no rank makes that step."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))

import weft
from program.divergent_on_processes import as_nccl
from weft.errors import RankFailure

ODD = 2


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def main() -> None:
    as_nccl()
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model, x = nn.Linear(4, 1), torch.randn(8, 4)
    before = model.weight.detach().clone()
    optimizer, ranks = (
        torch.optim.SGD(model.parameters(), lr=0.1),
        weft.placement("cpu", range(size)),
    )
    program = weft.compile(model, squares, optimizer, x, placement=ranks)
    with pytest.raises(RankFailure, match="different batches"):
        program.step(x + (rank == ODD))
    weight: Any = model.weight
    assert torch.equal(weight.to_local(), before)


main()
