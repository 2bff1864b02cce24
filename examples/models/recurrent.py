"""Recurrent models: a language model (RNNLM), a classifier of texts (RNNTC), and translation with attention (NMT).

The sizes are FlexFlow's (Jia et al., 2018: "Beyond data and model parallelism for deep neural networks", section 8.1).
Translation follows Luong et al. (2015: "Effective approaches to attention-based neural machine translation").
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

import weft

Batch = dict[str, Tensor]

# The gates of every cell over the ranks, and the vocabulary of the head.
LAYOUTS = {
    "*.weight_ih_l?": weft.split(0),
    "head.weight": weft.split(0),
    "head.bias": weft.split(0),
}


class LanguageModel(nn.Module):
    """RNNLM: tokens int64 [n, time] -> logits [n, time, vocabulary]."""

    def __init__(
        self, vocabulary: int = 10_000, width: int = 2048, layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.cells = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.cells(self.tokens(tokens))
        logits: Tensor = self.head(states)
        return logits


class Classifier(nn.Module):
    """RNNTC: tokens int64 [n, time] -> logits [n, classes] from the last state."""

    def __init__(
        self,
        vocabulary: int = 10_000,
        classes: int = 2,
        width: int = 1024,
        layers: int = 4,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.cells = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, tokens: Tensor) -> Tensor:
        states, _ = self.cells(self.tokens(tokens))
        logits: Tensor = self.head(states[:, -1])
        return logits


class Translation(nn.Module):
    """NMT: source and target int64 [n, time] -> logits [n, time, vocabulary] of the next target tokens."""

    def __init__(
        self, vocabulary: int = 32_000, width: int = 1024, layers: int = 2, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, width)
        self.target = nn.Embedding(vocabulary, width)
        self.encoder = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.decoder = nn.LSTM(width, width, layers, batch_first=True, dropout=dropout)
        self.query = nn.Linear(width, width, bias=False)
        self.joined = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, last = self.encoder(self.source(source))
        states, _ = self.decoder(self.target(target), last)
        weights = torch.softmax(self.query(states) @ read.transpose(1, 2), dim=-1)
        attended = torch.tanh(self.joined(torch.cat([weights @ read, states], dim=-1)))
        logits: Tensor = self.head(attended)
        return logits


def texts(n: int, seed: int, time: int = 40, vocabulary: int = 10_000, classes: int = 2) -> Batch:
    """Tokens [n, time + 1] and a class for each row."""
    generator = torch.Generator().manual_seed(seed)
    return {
        "tokens": torch.randint(vocabulary, (n, time + 1), generator=generator),
        "classes": torch.randint(classes, (n,), generator=generator),
    }


def next_token_loss(model: LanguageModel, batch: Batch) -> Tensor:
    """Mean cross-entropy of every token after the first."""
    logits = model(batch["tokens"][:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch["tokens"][:, 1:].flatten())


def class_loss(model: Classifier, batch: Batch) -> Tensor:
    """Mean cross-entropy of the classes of the texts."""
    return functional.cross_entropy(model(batch["tokens"]), batch["classes"])


def sentence_pairs(n: int, seed: int, time: int = 40, vocabulary: int = 32_000) -> Batch:
    """Sources [n, time] and targets [n, time + 1]."""
    source = texts(n, 2 * seed, time - 1, vocabulary)["tokens"]
    return {"source": source, "target": texts(n, 2 * seed + 1, time, vocabulary)["tokens"]}


def translation_loss(model: Translation, batch: Batch) -> Tensor:
    """Mean cross-entropy of every target token after the first."""
    logits = model(batch["source"], batch["target"][:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), batch["target"][:, 1:].flatten())
