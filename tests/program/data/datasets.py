"""Datasets whose samples draw, and a net that learns from them."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

SAMPLES, WIDTH, CLASSES = 50, 6, 4


def sample(number: int) -> dict[str, Any]:
    """It draws from every generator."""
    drawn = torch.randn(WIDTH) + random.random() + float(np.random.rand())
    return {"x": drawn.double() / 4 + number / SAMPLES, "y": number % CLASSES}


class Drawn(Dataset[dict[str, Any]]):
    """Map-style; counts what it was asked for, and fails for one sample if it is told."""

    def __init__(self, bad: int = -1) -> None:
        self.bad = bad
        self.asked: list[int] = []

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.asked.append(number)
        if number == self.bad:
            raise OSError("the file is gone")
        return sample(number)


class Streamed(IterableDataset[dict[str, Any]]):
    def __iter__(self) -> Iterator[dict[str, Any]]:
        yield from map(sample, range(SAMPLES))


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, CLASSES)).double()


def loss_fn(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def plain_losses(batches: Iterable[dict[str, Tensor]], epochs: int) -> list[float]:
    """The loss of each batch, on one device with plain PyTorch; each loop over `batches` is an epoch."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for _ in range(epochs):
        for batch in batches:
            loss = loss_fn(model, batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def example(size: int) -> dict[str, Tensor]:
    return {
        "x": torch.zeros(size, WIDTH, dtype=torch.float64),
        "y": torch.zeros(size, dtype=torch.long),
    }
