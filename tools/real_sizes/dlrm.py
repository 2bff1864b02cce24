"""DLRM (Naumov et al., 1906.00091) as its authors train it on Criteo's ads: tables, and two stacks of layers."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from tools.real_sizes.family import Batch

# Rows of the tables: the distinct values of each field of the data set.
ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194),
    *(27, 14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
NUMBERS, WIDTH = 13, 16


def _layers(widths: tuple[int, ...]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(widths):
        layers += [nn.Linear(inputs, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


class DLRM(nn.Module):
    """Ids int64 [n, 26] and numbers [n, 13] -> the logit of a click [n]."""

    def __init__(self) -> None:
        super().__init__()
        fields = len(ROWS) + 1
        self.tables = nn.ModuleList(nn.Embedding(rows, WIDTH) for rows in ROWS)
        self.bottom = _layers((NUMBERS, 512, 256, 64, WIDTH))
        self.top = _layers((WIDTH + fields * (fields - 1) // 2, 512, 256))
        self.head = nn.Linear(256, 1)
        places = torch.tril_indices(fields, fields, offset=-1, device="cpu")
        self.pairs = (places[0] * fields + places[1]).tolist()

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        x = self.bottom(numbers)
        looked_up = [table(ids[:, place]) for place, table in enumerate(self.tables)]
        every = torch.stack([x, *looked_up], dim=1)
        products = torch.bmm(every, every.transpose(1, 2)).flatten(1)
        pairs = torch.tensor(self.pairs, device=products.device)
        met = torch.cat([x, products.index_select(1, pairs)], dim=1)
        logit: Tensor = self.head(self.top(met)).squeeze(1)
        return logit


def batch(n: int, tokens: int) -> Batch:
    """Examples with their clicks."""
    with torch.device("meta"):
        ids = torch.empty(n, len(ROWS), dtype=torch.long)
        return {"ids": ids, "numbers": torch.empty(n, NUMBERS), "clicks": torch.empty(n)}


def loss(model: nn.Module, batch: Batch) -> Tensor:
    """Binary cross-entropy."""
    return functional.binary_cross_entropy_with_logits(
        model(batch["ids"], batch["numbers"]), batch["clicks"]
    )
