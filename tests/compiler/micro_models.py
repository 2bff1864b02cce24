"""Models and losses that look at the batch in many ways: at each sample, at counts, at statistics, at all at once."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from models import MLP, vector_batch

N = 8


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def labels_with_holes(n: int = N, ignored: int = -100) -> dict[str, Any]:
    """Most of the second half is ignored, so that micro-batches count differently."""
    batch = vector_batch(n)
    batch["y"][n // 2 + 1 :] = ignored
    return batch


def ignoring(model: nn.Module, batch: Any) -> Any:
    return F.cross_entropy(model(batch["x"]), batch["y"], ignore_index=-100)


class Weighted(nn.Module):
    """Cross-entropy with a weight for each class."""

    def __init__(self) -> None:
        super().__init__()
        self.model = MLP()
        self.loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 0.5, 4.0]), ignore_index=3)

    def forward(self, batch: Any) -> Any:
        return self.loss(self.model(batch["x"]), batch["y"])


def own_loss(model: nn.Module, batch: Any) -> Any:
    return model(batch)


def smoothed(model: nn.Module, batch: Any) -> Any:
    logits = model(batch["x"])
    loss = F.cross_entropy(logits, batch["y"], label_smoothing=0.1)
    return {"loss": loss, "logits": logits, "best": logits.argmax(1)}


def masked_mean(model: nn.Module, batch: Any) -> Any:
    """A mask that comes with the batch, of ones and zeros."""
    each = F.cross_entropy(model(batch["x"]), batch["y"].clamp(min=0), reduction="none")
    mask = (batch["y"] >= 0).to(each.dtype)
    return (each * mask).sum() / mask.sum()


def confident(model: nn.Module, batch: Any) -> Any:
    """The count depends on the model."""
    logits = model(batch["x"])
    sure = (logits.softmax(1).amax(1) > 0.3).to(logits.dtype)
    each = F.cross_entropy(logits, batch["y"], reduction="none")
    return (each * sure).sum() / (sure.sum() + 1.0)


def contrastive(model: nn.Module, batch: Any) -> Any:
    """Every sample against every other (InfoNCE)."""
    z = F.normalize(model(batch["x"]), dim=1)
    other = F.normalize(model(batch["x"] + 0.1), dim=1)
    return F.cross_entropy(z @ other.t() / 0.5, torch.arange(z.shape[0]))


def hardest(model: nn.Module, batch: Any) -> Any:
    """The mean of the largest losses of the batch."""
    each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
    return each.topk(3).values.mean()


def spread(model: nn.Module, batch: Any) -> Any:
    """Statistics of the whole batch, other than BatchNorm's."""
    out = model(batch["x"])
    return out.std(0).sum() + out.var() + (out.mean(0) ** 2).sum(), out.amax(), out.max(0).values


def by_size(model: nn.Module, batch: Any) -> Any:
    """The size of the batch as a number, and a mean over what is no batch."""
    out = model(batch["x"])
    n = batch["x"].shape[0]
    return (out.reshape(n, -1).mean(1) ** 2).sum() / n + out.abs().sum() / out.numel()


def penalized(model: nn.Module, batch: Any) -> Any:
    """A part of the loss that does not depend on the batch."""
    weights = sum((p**2).sum() for p in model.parameters())
    return F.mse_loss(model(batch["x"]), torch.zeros(N, 4)) + 0.01 * weights


class Gated(nn.Module):
    """Two experts, a gate, and the load-balancing loss over the whole batch (Switch Transformer)."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 2)
        self.experts = nn.ModuleList([MLP(), MLP()])

    def forward(self, batch: Any) -> Any:
        gates = self.gate(batch["x"]).softmax(1)
        chosen = F.one_hot(gates.argmax(1), 2).to(gates.dtype)
        outs = torch.stack([expert(batch["x"]) for expert in self.experts], 1)
        out = (outs * (gates * chosen).unsqueeze(2)).sum(1)
        balance = (gates.mean(0) * chosen.mean(0)).sum() * 2
        return F.cross_entropy(out, batch["y"]) + 0.1 * balance


class Recurrent(nn.Module):
    """An LSTM over [n, time, inputs], its last state to classes."""

    def __init__(self, batch_first: bool = True) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 6, batch_first=batch_first)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(x)
        logits: torch.Tensor = self.head(out[:, -1])
        return logits


def sequences() -> dict[str, Any]:
    batch = vector_batch(N)
    return {**batch, "x": torch.randn(N, 5, 8, generator=generator())}


class Noisy(nn.Module):
    """A variational autoencoder's noise, and samples that are made of noise alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread, self.out = nn.Linear(8, 3), nn.Linear(8, 3), nn.Linear(3, 8)

    def forward(self, batch: Any) -> Any:
        x = batch["x"]
        mean, log = self.mean(x), self.spread(x)
        z = mean + torch.randn_like(mean) * torch.exp(log / 2)
        fake = self.out(torch.randn(x.shape[0], 3, dtype=x.dtype))
        divergence = -(1 + log - mean**2 - log.exp()).sum(1).mean() / 2
        return F.mse_loss(self.out(z), x) + divergence + (fake**2).mean()


class Patches(nn.Module):
    """A vision transformer's beginning: patches, a class token, positions, attention."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.position = nn.Parameter(torch.randn(1, 5, 8))
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(x.shape[0], -1, -1), x], 1) + self.position
        logits: torch.Tensor = self.head(self.layer(x)[:, 0])
        return logits


def with_mask(model: nn.Module, batch: Any) -> Any:
    """A leaf that is no part of the batch, and one that is a number."""
    return (model(batch["x"] * batch["columns"]) ** 2).mean() * batch["scale"]


def masked_batch() -> dict[str, Any]:
    columns = torch.tensor([1.0, 0, 1, 1, 0, 1, 1, 1])[:8]
    return {**vector_batch(16), "columns": columns, "scale": torch.tensor(0.5)}


class Merged(nn.Module):
    """Time before the batch, both in one dimension: masks and sums over it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)

    def forward(self, batch: Any) -> Any:
        x = batch["x"].transpose(0, 1).flatten(0, 1)
        out = F.dropout(self.linear(x), 0.3)
        places = torch.linspace(0, 1, out.shape[0], dtype=x.dtype).unsqueeze(1)
        sums = (out * places).cumsum(0)
        return (sums**2).mean() + out.unflatten(0, (5, N)).amax(0).mean()
