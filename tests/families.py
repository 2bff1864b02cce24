"""Small random models of many families with random strategies, from seeds: what plans must hold for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from mixtures import Mixture
from models import classification_loss, token_loss

WORDS = 24


@dataclass(frozen=True, eq=False)
class Family:
    """A model of one family with what trains it.

    Attributes:
        model: the model.
        loss: of the model and a batch.
        batch: for all ranks together.
        split: layouts of parameters in a tensor-parallel strategy.
    """

    model: nn.Module
    loss: Callable[..., Any]
    batch: dict[str, Tensor]
    split: dict[str, Any]


class Recurrent(nn.Module):
    """Recurrent layers over embedded words, and scores of each place or of the last one."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        kind, width = random.choice([nn.LSTM, nn.LSTM, nn.GRU, nn.RNN]), random.choice([16, 24])
        self.words = nn.Embedding(WORDS, width)
        layers = random.choice([1, 2])
        self.layers = kind(
            width, width, layers, batch_first=True, bidirectional=random.random() < 0.3
        )
        self.head = nn.Linear(width * (1 + self.layers.bidirectional), WORDS)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(self.words(x))[0])
        return scores


class Images(nn.Module):
    """Convolutions with norms, pools, groups and strides, by chance."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 8, 3, padding=1)]
        parts: list[Callable[[], nn.Module]] = [
            lambda: nn.Conv2d(8, 8, 3, padding=1, groups=random.choice([1, 2, 8])),
            lambda: nn.Conv2d(8, 8, 3, stride=2, padding=1),
            lambda: nn.BatchNorm2d(8),
            lambda: nn.GroupNorm(2, 8),
            lambda: nn.MaxPool2d(3, 2, 1),
            lambda: nn.AvgPool2d(2),
            lambda: nn.GELU(),
            lambda: nn.Dropout2d(0.1),
            lambda: nn.ConvTranspose2d(8, 8, 2, stride=2),
        ]
        self.blocks = nn.Sequential(*layers, *(random.choice(parts)() for _ in range(4)))
        self.head = nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(x).mean((2, 3)))
        return scores


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, random: Random, width: int) -> None:
        super().__init__()
        self.first, self.second = (
            nn.LayerNorm(width),
            random.choice([nn.LayerNorm, nn.RMSNorm])(width),
        )
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(random.choice([0.0, 0.1]))
        self.fused = random.random() < 0.7

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.first(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        q, k, v = heads.unbind()
        if self.fused:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = (q @ k.mT / 4).softmax(-1) @ v
        x = x + self.drop(self.proj(mixed.transpose(1, 2).flatten(2)))
        made: Tensor = x + self.down(F.gelu(self.up(self.second(x))))
        return made


class Words(nn.Module):
    """Embedded words, layers of any kind, scores."""

    def __init__(self, width: int, layers: list[nn.Module], tied: bool = False) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(layers)
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.words.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.words(x)
        for layer in self.blocks:
            x = layer(x)
        scores: Tensor = self.head(x)
        return scores


class Bags(nn.Module):
    """Bags of embeddings in front of a small perceptron."""

    def __init__(self, random: Random) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(WORDS, 16, mode=random.choice(["sum", "mean"]))
        self.blocks = nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.ReLU())
        self.head = nn.Linear(32, WORDS)

    def forward(self, x: Tensor) -> Tensor:
        scores: Tensor = self.head(self.blocks(self.bag(x)))
        return scores


def _tokens(rows: int, places: int = 8) -> dict[str, Tensor]:
    shape = (rows, places)
    return {"x": torch.randint(WORDS, shape), "y": torch.randint(WORDS, shape)}


def recurrent(random: Random, rows: int) -> Family:
    return Family(Recurrent(random), token_loss, _tokens(rows, 6), {"head.*": weft.split(0)})


def images(random: Random, rows: int) -> Family:
    side = random.choice([8, 12])
    batch = {"x": torch.randn(rows, 3, side, side), "y": torch.randint(10, (rows,))}
    return Family(Images(random), classification_loss, batch, {"head.*": weft.split(0)})


def transformer(random: Random, rows: int) -> Family:
    width = random.choice([16, 32])
    layers: list[nn.Module] = [Block(random, width) for _ in range(random.choice([1, 2, 3]))]
    outer, inner = weft.split(0), weft.split(1)
    split = {"*.qkv.*": outer, "*.up.*": outer, "*.proj.weight": inner, "*.down.weight": inner}
    return Family(Words(width, layers, random.random() < 0.3), token_loss, _tokens(rows), split)


def mixture(random: Random, rows: int) -> Family:
    width = random.choice([16, 32])
    layers: list[nn.Module] = [Mixture(width, 4, F.silu) for _ in range(random.choice([1, 2]))]
    split = {"*.up": weft.split(0), "*.down": weft.split(0)}
    return Family(Words(width, layers), token_loss, _tokens(rows), split)


def bags(random: Random, rows: int) -> Family:
    batch = {"x": torch.randint(WORDS, (rows, 6)), "y": torch.randint(WORDS, (rows,))}
    return Family(Bags(random), classification_loss, batch, {"head.*": weft.split(0)})


FAMILIES = (recurrent, images, transformer, mixture, bags)


def optimizer(random: Random, model: nn.Module) -> torch.optim.Optimizer:
    """Any: fused, in a loop, or on lists."""
    parameters = list(model.parameters())
    made: list[Callable[[], torch.optim.Optimizer]] = [
        lambda: torch.optim.AdamW(parameters, lr=1e-3),
        lambda: torch.optim.SGD(parameters, lr=0.01, momentum=0.9),
        lambda: torch.optim.Adam(parameters, lr=1e-3, foreach=True),
        lambda: torch.optim.RMSprop(parameters, lr=1e-3),
        lambda: torch.optim.NAdam(parameters, lr=1e-3, weight_decay=0.1),
    ]
    return random.choice(made)()


def strategy(random: Random, family: Family, ranks: int) -> weft.Strategy:
    """Any that the family and so many ranks admit."""
    options: dict[str, Any] = {}
    ways = ["data", "zero"] if ranks == 1 else ["data", "zero", "zero", "tensor", "stages"]
    match random.choice(ways):
        case "zero":
            options["zero"] = weft.Zero(random.choice([1, 2, 3]))
        case "tensor":
            options["parameters"] = family.split
        case "stages":
            schedule = random.choice(["gpipe", "1f1b", "zero_bubble"])
            options |= {"stages": 2, "micro_batches": 2, "schedule": schedule}
    if random.random() < 0.25:
        options["micro_batches"] = 2
    if random.random() < 0.3 and hasattr(family.model, "blocks"):
        options["recompute"] = ["blocks.*"]
    return weft.Strategy({"*": weft.split(0)}, **options)
