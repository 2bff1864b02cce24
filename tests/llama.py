"""A Llama-shaped model in plain PyTorch: RMSNorm, RoPE, grouped heads of keys, SwiGLU."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from models import Batch


class RMSNorm(nn.Module):
    """Divides by the root of the mean square, [..., width] -> the same."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))


def _turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary positions: pairs of halves of the last dimension, turned by their angles."""
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat((-second, first), -1) * sin


class Attention(nn.Module):
    """[n, time, width] -> the same; `mask` bool, True where a query sees a key; causal without one."""

    def __init__(self, width: int, heads: int, key_heads: int, causal: bool) -> None:
        super().__init__()
        self.depth, self.causal = width // heads, causal
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, key_heads * self.depth, bias=False)
        self.value = nn.Linear(width, key_heads * self.depth, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        n, time, width = x.shape
        query, key, value = (
            layer(x).view(n, time, -1, self.depth).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        seen = F.scaled_dot_product_attention(
            _turned(query, cos, sin),
            _turned(key, cos, sin),
            value,
            attn_mask=mask,
            is_causal=self.causal and mask is None,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        out: torch.Tensor = self.out(seen.transpose(1, 2).reshape(n, time, width))
        return out


class Block(nn.Module):
    """[n, time, width] -> the same."""

    def __init__(self, width: int, heads: int, key_heads: int, inner: int, causal: bool) -> None:
        super().__init__()
        self.norm1, self.norm2 = RMSNorm(width), RMSNorm(width)
        self.attention = Attention(width, heads, key_heads, causal)
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, mask: torch.Tensor | None
    ) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), cos, sin, mask)
        y = self.norm2(x)
        out: torch.Tensor = x + self.down(F.silu(self.gate(y)) * self.up(y))
        return out


class Llama(nn.Module):
    """Tokens int64 [n, time] -> logits [n, time, vocabulary]."""

    def __init__(
        self,
        vocabulary: int = 17,
        width: int = 16,
        layers: int = 2,
        heads: int = 4,
        key_heads: int = 2,
        inner: int = 24,
        causal: bool = True,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.depth = width // heads
        self.tokens = nn.Embedding(vocabulary, width)
        blocks = (Block(width, heads, key_heads, inner, causal) for _ in range(layers))
        self.blocks = nn.ModuleList(blocks)
        self.norm = RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(tokens)
        places = torch.arange(tokens.shape[1], device=x.device, dtype=x.dtype)
        halves = torch.arange(0, self.depth, 2, device=x.device, dtype=x.dtype)
        angles = places[:, None] * 1e4 ** (-halves / self.depth)
        angles = torch.cat((angles, angles), -1)
        for block in self.blocks:
            x = block(x, angles.cos(), angles.sin(), mask)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def next_token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of each token's successor, within `batch["x"]`, int64 [n, time].

    Where there is `batch["padded"]`, bool [n, time], its True positions are neither seen nor
    predicted.
    """
    tokens, padded = batch["x"], batch.get("padded")
    mask = None
    if padded is not None:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        mask = (places <= places[:, None]) & ~padded[:, None, None, :]
        tokens = tokens.masked_fill(padded, 0)
    labels = tokens if padded is None else tokens.masked_fill(padded, -100)
    after = F.pad(labels, (0, 1), value=-100)[..., 1:]
    logits = model(tokens) if mask is None else model(tokens, mask)
    return F.cross_entropy(logits.flatten(0, 1), after.flatten(), ignore_index=-100)


def long_batch(time: int = 8, n: int = 1, seed: int = 0, padded: int = 0) -> Batch:
    """Tokens for `next_token_loss`; the last `padded` of the first sequence are padding."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(17, (n, time), generator=generator)
    if not padded:
        return {"x": tokens}
    mask = torch.zeros(n, time, dtype=torch.bool)
    mask[0, time - padded :] = True
    return {"x": tokens, "padded": mask}
