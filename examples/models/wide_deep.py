"""Wide & Deep (Cheng et al., 2016: "Wide & deep learning for recommender systems"), its tables split by rows."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

import weft

Batch = dict[str, Tensor]

# Each rank holds a part of the vocabulary; every rank looks up its own rows only.
LAYOUTS = {"wide.weight": weft.split(0), "deep.weight": weft.split(0)}


class WideDeep(nn.Module):
    """Ids int64 [n, fields] and numbers [n, dense] -> the logit of a click [n].

    Args:
        vocabulary: rows of both tables.
        fields: ids of an example.
        dense: numbers of an example.
        width: columns of the deep table.
        hidden: widths of the deep part's layers.
    """

    def __init__(
        self,
        vocabulary: int = 2_322_444,
        fields: int = 26,
        dense: int = 13,
        width: int = 16,
        hidden: Sequence[int] = (1024, 1024, 1024),
    ) -> None:
        super().__init__()
        self.wide = nn.Embedding(vocabulary, 1)
        self.deep = nn.Embedding(vocabulary, width)
        widths = [fields * width + dense, *hidden]
        layers: list[nn.Module] = []
        for inputs, outputs in pairwise(widths):
            layers += [nn.Linear(inputs, outputs), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Linear(widths[-1], 1))

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        known = torch.cat([self.deep(ids).flatten(1), numbers], dim=1)
        logit: Tensor = self.layers(known).squeeze(1) + self.wide(ids).sum((1, 2))
        return logit


def batch(
    n: int, seed: int, vocabulary: int = 2_322_444, fields: int = 26, dense: int = 13
) -> Batch:
    """Random examples with their clicks, 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.get_default_dtype()
    return {
        "ids": torch.randint(vocabulary, (n, fields), generator=generator),
        "numbers": torch.randn(n, dense, generator=generator, dtype=dtype),
        "clicks": torch.randint(2, (n,), generator=generator).to(dtype),
    }


def loss(model: WideDeep, batch: Batch) -> Tensor:
    """Mean binary cross-entropy."""
    return functional.binary_cross_entropy_with_logits(
        model(batch["ids"], batch["numbers"]), batch["clicks"]
    )
