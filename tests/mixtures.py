"""A small language model of mixtures of experts, with torch's grouped products."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from models import token_batch

CHOSEN, WORDS = 2, 13
Product = Callable[..., Tensor]


def plain_product(x: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
    """Torch's grouped product, which takes no float64 on one device."""
    ends = [0, *offs.tolist()]
    return torch.cat([x[ends[i] : ends[i + 1]] @ w[i] for i in range(len(w))])


def either_product(x: Tensor, w: Tensor, *, offs: Tensor) -> Tensor:
    """Torch's while a step is captured, else the plain one: for one model in both."""
    product = F.grouped_mm if isinstance(x, FakeTensor) else plain_product
    return product(x, w, offs=offs)


class Mixture(nn.Module):
    """Experts as in `transformers`: rows sorted by experts, two grouped products, rows put back.

    [n, time, width] -> the same.
    """

    def __init__(
        self,
        width: int,
        experts: int,
        middle: Callable[[Tensor], Tensor],
        each: int = CHOSEN,
        biased: bool = False,
    ) -> None:
        super().__init__()
        self.product: Product = F.grouped_mm
        self.middle = middle
        self.each = each
        self.biased = biased
        self.gate = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, 4 * width, width) / width)
        self.down = nn.Parameter(torch.randn(experts, width, 2 * width) / width)
        if biased:
            self.up_bias = nn.Parameter(torch.randn(experts, 4 * width))
            self.down_bias = nn.Parameter(torch.randn(experts, width))

    def forward(self, x: Tensor) -> Tensor:
        experts, _, width = self.up.shape
        tokens = x.reshape(-1, width)
        weights, chosen = self.gate(tokens).softmax(-1).topk(self.each)
        ids, order = torch.sort(chosen.reshape(-1))
        offs = torch.histc(ids.float(), experts, 0, experts - 1).cumsum(0, dtype=torch.int32)
        rows = self.product(tokens[order // self.each], self.up.transpose(1, 2), offs=offs)
        rows = rows + self.up_bias[ids] if self.biased else rows
        gate, up = rows.chunk(2, -1)
        rows = self.product(self.middle(gate) * up, self.down.transpose(1, 2), offs=offs)
        rows = rows + self.down_bias[ids] if self.biased else rows
        rows = rows * weights.reshape(-1)[order].unsqueeze(-1)
        back = torch.empty_like(order)
        back[order] = torch.arange(len(order), device=x.device)
        return x + rows[back].view(-1, self.each, width).sum(1).view(x.shape)


class Model(nn.Module):
    """Embedding, mixtures, a head: tokens int64 [n, time] -> logits; `more` is for the mixtures."""

    def __init__(
        self,
        width: int = 8,
        experts: int = 4,
        middle: Callable[[Tensor], Tensor] = F.silu,
        layers: int = 1,
        product: Product = F.grouped_mm,
        **more: Any,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        mixtures = (Mixture(width, experts, middle, **more) for _ in range(layers))
        self.layers = nn.ModuleList(mixtures)
        self.head = nn.Linear(width, WORDS)
        for layer in self.layers:
            layer.product = product

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: Tensor = self.head(x)
        return logits


def for_both() -> Model:
    """A model that trains on one device and under weft, in float64 too."""
    return Model(product=either_product)


def word_batch(n: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """A batch for these models."""
    return token_batch(n, vocabulary=WORDS, seed=seed)


def pair(**options: Any) -> tuple[Model, Model]:
    """A model of torch's grouped products, and the same with plain ones."""
    torch.manual_seed(0)
    model = Model(**options)
    plain = copy.deepcopy(model)
    for layer in plain.layers:
        layer.product = plain_product
    return model, plain
