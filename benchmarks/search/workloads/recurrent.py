"""RNNTC, RNNLM and NMT with layers that read their sequences in pieces, as FlexFlow's own programs do.

A layer's piece is one op, so that a layer can begin with what the layer below has made of the first time steps. Sizes
are those of the paper's section 8.1: 40 time steps, layers of 1,024 (RNNTC, NMT) or 2,048 (RNNLM).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

Batch = dict[str, Tensor]
States = tuple[Tensor, Tensor]

TIME, PIECE = 40, 10
WORDS, CLASSES = 10_000, 2


class Layers(nn.Module):
    """LSTM layers: [n, time, width] -> the last one's states, in pieces of the time; and where each layer ended."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        made = (nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.layers = nn.ModuleList(made)

    def forward(
        self, pieces: list[Tensor], ends: list[States | None]
    ) -> tuple[list[Tensor], list[States | None]]:
        found: list[States | None] = []
        for layer, state in zip(self.layers, ends, strict=True):
            made = []
            for piece in pieces:
                out, state = layer(piece, state)
                made.append(out)
            pieces = made
            found.append(state)
        return pieces, found


class Sequences(nn.Module):
    """Tokens [n, time] to logits: of each next token (RNNLM), or of the text's class (RNNTC)."""

    def __init__(self, width: int, layers: int, words: int, outputs: int, last: bool) -> None:
        super().__init__()
        self.token = nn.Embedding(words, width)
        self.stack = Layers(width, layers)
        self.head = nn.Linear(width, outputs)
        self.last = last

    def forward(self, tokens: Tensor) -> Tensor:
        pieces = [self.token(piece) for piece in tokens.split(PIECE, dim=1)]
        states, _ = self.stack(pieces, [None] * len(self.stack.layers))
        logits: Tensor = self.head(states[-1][:, -1] if self.last else torch.cat(states, 1))
        return logits


class Translator(nn.Module):
    """NMT: source and target tokens [n, time] to logits [n, time, words] of the next target tokens."""

    def __init__(self, width: int, words: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(words, width), nn.Embedding(words, width)
        self.encoder, self.decoder = Layers(width, 2), Layers(width, 2)
        self.query = nn.Linear(width, width, bias=False)
        self.joined = nn.Linear(2 * width, width, bias=False)
        self.head = nn.Linear(width, words)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        read, ends = self.encoder([self.source(p) for p in source.split(PIECE, 1)], [None, None])
        states, _ = self.decoder([self.target(p) for p in target.split(PIECE, 1)], ends)
        seen = torch.cat(read, 1)
        made = torch.cat(states, 1)
        weights = torch.softmax(self.query(made) @ seen.transpose(1, 2), dim=-1)
        logits: Tensor = self.head(torch.tanh(self.joined(torch.cat([weights @ seen, made], -1))))
        return logits


def pair_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of all target tokens."""
    logits = model(batch["source"], batch["target"])
    return cross_entropy(logits.flatten(0, 1), batch["y"].flatten())
