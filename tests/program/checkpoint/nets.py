"""A small net of everything that a checkpoint meets, and ways to lay it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import weft

WORDS = 13


class Net(nn.Module):
    """Tied weights, written buffers, one that no state_dict has, dropout, and a layer that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, 10)
        self.first = nn.Linear(10, 14)
        self.norm = nn.BatchNorm1d(14)
        self.last = nn.Linear(14, 10)
        self.unused = nn.Linear(3, 3)
        self.dropout = nn.Dropout(0.2)
        self.head = nn.Linear(10, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, words: Tensor) -> Tensor:
        self.seen.add_(1)
        hidden = torch.relu(self.norm(self.first(self.embedding(words))))
        return self.head(self.last(self.dropout(hidden)))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]).double(), batch[1])


def batch_of(seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    words = torch.randint(0, WORDS, (2, 12), generator=generator)
    return words[0], words[1]


@dataclass(frozen=True)
class Case:
    """A way to train it.

    Attributes:
        grid: of ranks.
        entries: of the strategy.
        optimizer: class, and its options.
        dtype: of the model.
        seed: of its first values.
    """

    grid: tuple[int, ...] = (1,)
    entries: dict[str, Any] = field(default_factory=dict)
    optimizer: tuple[str, dict[str, Any]] = ("AdamW", {"lr": 1e-2})
    dtype: torch.dtype = torch.float64
    seed: int = 0

    def parts(self) -> tuple[nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(self.seed)
        model = Net().to(self.dtype)
        name, options = self.optimizer
        return model, getattr(torch.optim, name)(model.parameters(), **options)


@contextmanager
def compiled(case: Case, draws: int = 3) -> Iterator[tuple[weft.Program, torch.optim.Optimizer]]:
    """The program of a case on ranks that are threads."""
    model, optimizer = case.parts()
    ranks = torch.arange(torch.Size(case.grid).numel()).reshape(case.grid)
    batch = {"*": (weft.split(0), *[weft.broadcast] * (len(case.grid) - 1))}
    strategy = weft.Strategy(**{"batch": batch, **case.entries})
    place = weft.placement("cpu", ranks.tolist())
    with weft.local_world(ranks.numel()):
        program = weft.compile(
            *(model, loss_fn, optimizer, batch_of(0)),
            placement=place,
            strategy=strategy,
            seed=draws,
        )
        yield program, optimizer
        program.close()


def everything(program: weft.Program) -> dict[str, Any]:
    """All that a program holds, whole."""
    found: dict[str, Any] = dict(program.full_state_dict())
    states = program.full_optimizer_state_dict()
    for number, entries in states["state"].items():
        found |= {f"{number}.{name}": value for name, value in entries.items()}
    return {**found, "groups": states["param_groups"]}


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        same = (
            torch.equal(value, other[name]) if isinstance(value, Tensor) else value == other[name]
        )
        assert same, name
