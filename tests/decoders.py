"""Decoders as people train them, small in width but not in shape: RMSNorm, rotations, shared heads, SwiGLU, experts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

COLUMNS = (
    *(f"blocks.*.attention.{each}" for each in "qkv"),
    "blocks.*.feed.gate",
    "blocks.*.feed.up",
)
ROWS = ("blocks.*.attention.proj", "blocks.*.feed.down")
EXPERTS = ("blocks.*.feed.gates", "blocks.*.feed.ups", "blocks.*.feed.downs")


@dataclass(frozen=True)
class Shape:
    """What tells families apart.

    Attributes:
        pairs: heads of keys and values, for 4 of queries.
        tied: whether the last layer has the weights of the embedding.
        centered: norms multiply by 1 + weight, and embeddings by the root of the width (Gemma).
        normed: queries and keys have a norm for each head (Qwen3).
        experts: in place of each feed-forward net, two of which take a token; 0 for none.
    """

    width: int = 16
    hidden: int = 40
    layers: int = 2
    pairs: int = 2
    vocabulary: int = 32
    tied: bool = False
    centered: bool = False
    normed: bool = False
    experts: int = 0


class RMSNorm(nn.Module):
    """Written out: x / sqrt(mean of squares) * weight, over the last dimension."""

    def __init__(self, width: int, centered: bool) -> None:
        super().__init__()
        self.shift = float(centered)
        self.weight = nn.Parameter(torch.randn(width) * 0.1 + (1 - self.shift))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return (self.weight + self.shift) * (x * scale)


def rotated(x: torch.Tensor) -> torch.Tensor:
    """[n, heads, time, size] with pairs of features turned by their position."""
    time, size = x.shape[-2:]
    speeds = 100.0 ** -(torch.arange(0, size, 2, device=x.device).to(x.dtype) / size)
    angles = torch.arange(time, device=x.device).to(x.dtype)[:, None] * speeds
    cos, sin = (torch.cat([each, each], dim=-1) for each in (angles.cos(), angles.sin()))
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], dim=-1) * sin


class Attention(nn.Module):
    """Causal self-attention of 4 heads: [n, time, width] -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size = shape.width // 4
        self.q, self.proj = (nn.Linear(shape.width, shape.width, bias=False) for _ in range(2))
        inner = shape.pairs * self.size
        self.k, self.v = (nn.Linear(shape.width, inner, bias=False) for _ in range(2))
        self.q_norm, self.k_norm = (
            RMSNorm(self.size, shape.centered) if shape.normed else nn.Identity() for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.size)) for part in (self.q, self.k, self.v))
        q, k = (rotated(each.transpose(1, 2)) for each in (self.q_norm(q), self.k_norm(k)))
        out = F.scaled_dot_product_attention(
            q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True
        )
        proj: torch.Tensor = self.proj(out.transpose(1, 2).flatten(2))
        return proj


class SwiGLU(nn.Module):
    """[n, time, width] -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, hidden = shape.width, shape.hidden
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        down: torch.Tensor = self.down(F.silu(self.gate(x)) * self.up(x))
        return down


class Experts(nn.Module):
    """The best two of several SwiGLUs for each token, all of them computed: [n, time, width] -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        count, width, hidden = shape.experts, shape.width, shape.hidden
        self.router = nn.Linear(width, count, bias=False)
        self.gates, self.ups = (
            nn.Parameter(torch.randn(count, width, hidden) / width**0.5) for _ in range(2)
        )
        self.downs = nn.Parameter(torch.randn(count, hidden, width) / hidden**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        best, chosen = self.router(x).softmax(-1).topk(2)
        best = best / best.sum(-1, keepdim=True)
        counts = (F.one_hot(chosen, len(self.gates)).to(x.dtype) * best[..., None]).sum(-2)
        gate, up = (torch.einsum("ntw,ewh->enth", x, each) for each in (self.gates, self.ups))
        made = torch.einsum("enth,ehw->entw", F.silu(gate) * up, self.downs)
        return torch.einsum("entw,nte->ntw", made, counts)


class Block(nn.Module):
    """A norm before each part, a sum after it: [n, time, width] -> the same."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = (RMSNorm(shape.width, shape.centered) for _ in range(2))
        self.attention = Attention(shape)
        self.feed = Experts(shape) if shape.experts else SwiGLU(shape)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.feed(self.norm2(x))
        return out


class Decoder(nn.Module):
    """Tokens int64 [n, time] -> logits [n, time, vocabulary]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.scale = shape.width**0.5 if shape.centered else 1.0
        self.tokens = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = RMSNorm(shape.width, shape.centered)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        if shape.tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.head(self.norm(self.blocks(self.tokens(tokens) * self.scale)))
        return logits
