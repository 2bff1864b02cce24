"""A recommender: DLRM on made-up clicks, with its tables of embeddings split over the ranks.

    weft run -n 2 examples/dlrm.py --strategy columns

By rows: each rank holds a part of every table's ids, and looks up its own. By columns: each rank holds a part of every
vector. Batch and networks are data parallel in both.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from gallery import Plain, Run
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

import weft

FIELDS, IDS, NUMBERS = 8, 5000, 13
Batch = dict[str, Tensor]


def strategy(dim: int) -> weft.Strategy:
    """The batch split, tables split along a dimension, the rest whole."""
    return weft.Strategy(
        batch={"*": weft.split(0)},
        parameters={"tables.*.weight": weft.split(dim), "*": weft.broadcast},
    )


STRATEGIES = {"rows": strategy(0), "columns": strategy(1)}


class DLRM(nn.Module):
    """Ids int64 [n, FIELDS] and numbers [n, NUMBERS] to the logits of clicks [n] (Naumov et al. 2019)."""

    pairs: Tensor

    def __init__(self, width: int = 32, hidden: int = 128) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(IDS, width) for _ in range(FIELDS))
        self.bottom = nn.Sequential(
            nn.Linear(NUMBERS, hidden), nn.ReLU(), nn.Linear(hidden, width), nn.ReLU()
        )
        pairs = FIELDS * (FIELDS + 1) // 2
        self.top = nn.Sequential(nn.Linear(width + pairs, hidden), nn.ReLU(), nn.Linear(hidden, 1))
        one, other = torch.triu_indices(FIELDS + 1, FIELDS + 1, offset=1)
        self.register_buffer("pairs", one * (FIELDS + 1) + other)

    def forward(self, ids: Tensor, numbers: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        found = [table(ids[:, field]) for field, table in enumerate(self.tables)]
        vectors = torch.stack([dense, *found], dim=1)
        products = (vectors @ vectors.transpose(1, 2)).flatten(1)
        known = torch.cat([dense, products.index_select(1, self.pairs)], dim=1)
        return self.top(known).squeeze(1)


def clicks(steps: int, size: int = 256) -> list[Batch]:
    """Examples whose clicks hang on a taste for each id, and on the numbers; a few ids are frequent."""
    generator = torch.Generator().manual_seed(0)
    n = steps * size
    ids = (torch.rand(n, FIELDS, generator=generator) ** 4 * IDS).long()
    numbers = torch.randn(n, NUMBERS, generator=generator)
    tastes = torch.randn(FIELDS, IDS, generator=generator)
    weights = torch.randn(NUMBERS, generator=generator) / 4
    liked = tastes[torch.arange(FIELDS), ids].sum(1) + numbers @ weights
    clicked = (torch.rand(n, generator=generator) < liked.sigmoid()).float()
    parts = zip(ids.split(size), numbers.split(size), clicked.split(size))
    return [{"ids": one, "numbers": two, "clicked": three} for one, two, three in parts]


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    found = model(batch["ids"], batch["numbers"])
    return binary_cross_entropy_with_logits(found, batch["clicked"])


def main(words: Sequence[str] | None = None) -> None:
    run = Run(__doc__, STRATEGIES, 200, words)
    torch.manual_seed(0)
    model = DLRM()
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.05)
    plain, batches = Plain(model, (loss_fn, optimizer)), clicks(run.steps)
    with run.world():
        program = weft.compile(
            model, loss_fn, optimizer, batches[0], placement=run.placement, strategy=run.strategy
        )
        run.train(batches, plain, program)
        run.finish(program)


if __name__ == "__main__":
    main()
