"""A GPT and a BERT. Query, key and value are linear layers of their own, as tensor parallelism wants them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, scaled_dot_product_attention


class Attention(nn.Module):
    """Self-attention: (batch, length, width) to the same."""

    def __init__(self, width: int, heads: int, causal: bool) -> None:
        super().__init__()
        self.size, self.causal = width // heads, causal
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))
        self.proj = nn.Linear(width, width)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """`mask` (batch, 1, 1, length), bool, says which positions are looked at."""
        # The number of heads is left open: under tensor parallelism a rank has a part of them.
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        attended = scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)
        return self.proj(attended.transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """The feed-forward net: (batch, length, width) to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x)))


class Decoder(nn.Module):
    """A block of GPT-2: a norm before each part, a sum after it."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention, self.feed = Attention(width, heads, causal=True), Feed(width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.feed(self.norm2(x))


class GPT(nn.Module):
    """Predicts the next token: tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Decoder(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.token(x) + self.position(positions))))


class Encoder(nn.Module):
    """A block of BERT: a norm after each sum."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.feed = Attention(width, heads, causal=False), Feed(width)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.norm1(x + self.attention(x, mask))
        return self.norm2(x + self.feed(x))


class BERT(nn.Module):
    """Masked language model: tokens (batch, length) to logits (batch, length, vocabulary).

    As BERT, but for one kind of segment, no dropout, and a last layer that is not tied to the
    embedding.
    """

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.first_norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Encoder(width, heads) for _ in range(layers))
        self.transform, self.norm = nn.Linear(width, width), nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        """`mask` (batch, length), bool: True where there is a token and no padding."""
        positions = torch.arange(x.shape[1], device=x.device)
        out = self.first_norm(self.token(x) + self.position(positions))
        for block in self.blocks:
            out = block(out, mask[:, None, None, :])
        return self.head(self.norm(gelu(self.transform(out))))
