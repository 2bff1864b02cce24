"""Batches and the loss that the image models share."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

Batch = dict[str, Tensor]


def batch(n: int, seed: int, side: int = 224, classes: int = 1000) -> Batch:
    """Random images [n, 3, side, side] and their classes [n]."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "images": torch.randn(
            n, 3, side, side, generator=generator, dtype=torch.get_default_dtype()
        ),
        "classes": torch.randint(classes, (n,), generator=generator),
    }


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy."""
    return functional.cross_entropy(model(batch["images"]), batch["classes"])
