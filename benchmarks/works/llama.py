"""A Llama, and a Mixtral: the same with experts in place of its feed-forward nets.

Written out as transformers' models are (norm, rotation, experts through `grouped_mm`), so that all systems get
the ops that people train; in plain PyTorch, so that no peer needs another package. Query, key and value are linear
layers of their own there too.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import grouped_mm, scaled_dot_product_attention, silu, softmax

Rotation = tuple[Tensor, Tensor]
BASE = 10000.0  # of the wave lengths (Su et al., arXiv 2104.09864, section 3.2.2)
EPSILON = 1e-5


class RMSNorm(nn.Module):
    """Divides by the root of the mean square over the last dimension (arXiv 1910.07467): any shape to the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        squares = x.float().pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(squares + EPSILON)).to(x.dtype)


def rotation(length: int, size: int, like: Tensor) -> Rotation:
    """Cosines and sines (length, size) of the angles by which positions turn pairs of features."""
    halves = torch.arange(0, size, 2, device=like.device).float() / size
    angles = torch.arange(length, device=like.device).float()[:, None] / BASE**halves
    both = torch.cat([angles, angles], dim=-1)
    return both.cos().to(like.dtype), both.sin().to(like.dtype)


def rotated(x: Tensor, by: Rotation) -> Tensor:
    """(batch, heads, length, size) to the same; features i and i + size / 2 are a pair."""
    first, second = x.chunk(2, dim=-1)
    return x * by[0] + torch.cat([-second, first], dim=-1) * by[1]


class GroupedAttention(nn.Module):
    """Causal self-attention in which several heads share a key and a value: (batch, length, width) to the same."""

    def __init__(self, width: int, heads: int, pairs: int) -> None:
        super().__init__()
        self.size = width // heads
        self.q, self.proj = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.k, self.v = (nn.Linear(width, pairs * self.size, bias=False) for _ in range(2))

    def forward(self, x: Tensor, by: Rotation) -> Tensor:
        # The number of heads is left open: under tensor parallelism a rank has a part of them.
        q, k, v = (
            part(x).unflatten(-1, (-1, self.size)).transpose(1, 2)
            for part in (self.q, self.k, self.v)
        )
        q, k = rotated(q, by), rotated(k, by)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.proj(attended.transpose(1, 2).flatten(2))


class SwiGLU(nn.Module):
    """The feed-forward net (Shazeer, arXiv 2002.05202): (batch, length, width) to the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(silu(self.gate(x)) * self.up(x))


class Experts(nn.Module):
    """Each token goes through the `chosen` of `count` SwiGLUs that a router finds best: (…, width) to the same.

    Tokens are sorted by expert, and one grouped product takes all experts (transformers' default form).
    """

    def __init__(self, width: int, hidden: int, count: int, chosen: int) -> None:
        super().__init__()
        self.count, self.chosen = count, chosen
        self.router = nn.Linear(width, count, bias=False)
        self.gate_up = nn.Parameter(torch.randn(count, 2 * hidden, width) / width**0.5)
        self.down = nn.Parameter(torch.randn(count, width, hidden) / hidden**0.5)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        weights, experts = softmax(self.router(tokens), dim=-1).topk(self.chosen, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        ordered, order = experts.flatten().sort()
        sizes = torch.histc(ordered.float(), self.count, 0, self.count - 1)
        ends = sizes.cumsum(0, dtype=torch.int32)
        gate, up = grouped_linear(tokens[order // self.chosen], self.gate_up, ends).chunk(2, -1)
        made = grouped_linear(silu(gate) * up, self.down, ends)
        back = (made * weights.flatten()[order, None])[order.argsort()]
        return back.view(len(tokens), self.chosen, -1).sum(1).view(x.shape)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Rows of `x` up to each of `ends` by that expert's `weight` (experts, outputs, inputs)."""
    return grouped_mm(x, weight.transpose(-2, -1), offs=ends)


class Layer(nn.Module):
    """A block: a norm before each part, a sum after it."""

    def __init__(self, width: int, heads: int, pairs: int, feed: nn.Module) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention, self.feed = GroupedAttention(width, heads, pairs), feed

    def forward(self, x: Tensor, by: Rotation) -> Tensor:
        x = x + self.attention(self.norm1(x), by)
        return x + self.feed(self.norm2(x))


class Llama(nn.Module):
    """Predicts the next token: tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(
        self,
        layers: int,
        width: int,
        heads: int,
        pairs: int,
        hidden: int,
        vocabulary: int,
        tied: bool = False,
        experts: int = 0,
    ) -> None:
        """
        Args:
            layers: blocks.
            width: of the activations.
            heads: of queries.
            pairs: of key and value, each for `heads / pairs` queries.
            hidden: of a feed-forward net, or of each expert.
            vocabulary: tokens.
            tied: whether the last layer has the weights of the embedding.
            experts: in place of each feed-forward net, two of which take a token; 0 for none.
        """
        super().__init__()
        self.size = width // heads
        self.token = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(
            Layer(width, heads, pairs, feed(width, hidden, experts)) for _ in range(layers)
        )
        self.norm, self.head = RMSNorm(width), nn.Linear(width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=width**-0.5)
        if tied:
            self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        by = rotation(x.shape[1], self.size, self.norm.weight)
        out = self.token(x)
        for block in self.blocks:
            out = block(out, by)
        return self.head(self.norm(out))


def feed(width: int, hidden: int, experts: int) -> nn.Module:
    return Experts(width, hidden, experts, 2) if experts else SwiGLU(width, hidden)
