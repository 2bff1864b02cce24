"""A GPT in plain PyTorch: it knows nothing of ranks."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention

# "x": the tokens, "y": the tokens that follow; both (batch, length), int64.
Batch = dict[str, Tensor]


class Block(nn.Module):
    """Attention and a feed-forward net, each with a norm before it and a sum after it (GPT-2)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder that predicts the next token."""

    def __init__(
        self, layers: int, width: int, heads: int, length: int, vocabulary: int = 256
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, length) to logits (batch, length, vocabulary)."""
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.token(x) + self.position(positions))))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next token."""
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())
