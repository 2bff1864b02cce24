"""A decoder as published systems train it: GPT's form or Llama's, with attention fused or written out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import (
    cross_entropy,
    gelu,
    scaled_dot_product_attention,
    softmax,
)

from benchmarks.works.llama import RMSNorm, SwiGLU, rotated, rotation


@dataclass(frozen=True)
class Form:
    """The sizes and the form of a decoder.

    Attributes:
        width: of the activations.
        heads: of queries.
        pairs: of key and value.
        hidden: of the feed-forward nets.
        vocabulary: tokens.
        length: tokens of a sequence.
        llama: RMSNorm, rotation and SwiGLU without biases; else LayerNorm, learned positions and GELU with them.
        fused: attention is one kernel; else products with a softmax between them.
        tied: the last layer has the weights of the embedding.
        dropout: of attention and of each part's result.
        masked: only some tokens are predicted, as by BERT (arXiv 1810.04805); else each one's next.
        predicted: tokens of a sequence of which logits are computed; 0 for all.
        experts: of every second layer, as in GShard (arXiv 2006.16668); 0 for none.
    """

    width: int
    heads: int
    pairs: int
    hidden: int
    vocabulary: int
    length: int
    llama: bool = False
    fused: bool = False
    tied: bool = True
    dropout: bool = False
    masked: bool = False
    predicted: int = 0
    experts: int = 0

    @property
    def layers_of_block(self) -> int:
        """Layers that come again together."""
        return 2 if self.experts else 1


class Dropped(nn.Module):
    """Dropout's traffic without its random numbers, of which a capture draws all."""

    def forward(self, x: Tensor) -> Tensor:
        return x.masked_fill(x > 1e4, 0.0)


def dropped(form: Form) -> nn.Module:
    """Dropout where the form has it."""
    return Dropped() if form.dropout else nn.Identity()


class Core(nn.Module):
    """Causal attention without its matrices: queries (batch, heads, length, size) to the same."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.fused, self.drop = form.fused, dropped(form)

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.fused:
            return scaled_dot_product_attention(
                q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1]
            )
        if q.shape[1] != k.shape[1]:
            k, v = (part.repeat_interleave(q.shape[1] // k.shape[1], 1) for part in (k, v))
        places = torch.arange(q.shape[2], device=q.device)
        scores = (q @ k.transpose(2, 3)) * q.shape[-1] ** -0.5
        scores = scores.masked_fill(places[:, None] < places, -1e4)
        return self.drop(softmax(scores, dim=-1)) @ v


class PackedAttention(nn.Module):
    """Self-attention whose queries, keys and values are one product, head by head as Megatron-LM packs them."""

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.size, self.group = form.width // form.heads, form.heads // form.pairs
        packed = form.pairs * (self.group + 2) * self.size
        self.qkv = nn.Linear(form.width, packed, bias=not form.llama)
        self.core = Core(form)
        self.proj = nn.Linear(form.width, form.width, bias=not form.llama)

    def forward(self, x: Tensor, by: tuple[Tensor, Tensor] | None) -> Tensor:
        packed = self.qkv(x).unflatten(-1, (-1, self.group + 2, self.size))
        q = packed[..., : self.group, :].flatten(2, 3).transpose(1, 2)
        k, v = (packed[..., self.group + i, :].transpose(1, 2) for i in (0, 1))
        if by is not None:
            q, k = rotated(q, by), rotated(k, by)
        return self.proj(self.core(q, k, v).transpose(1, 2).flatten(2))


class Feed(nn.Module):
    """Two layers with GELU between them: (batch, length, width) to the same."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gelu(self.up(x), approximate="tanh"))


class Experts(nn.Module):
    """A mixture whose rows reach the experts' buffers by products: (batch, length, width) to the same.

    Two experts take a row. A sequence is a group, and a buffer holds twice an expert's even share of the group's rows
    (arXiv 2006.16668). Which place a row takes is left out: the products with masks of all places are what it costs.
    """

    def __init__(self, form: Form) -> None:
        super().__init__()
        self.count, self.places = form.experts, max(1, 2 * form.length // form.experts)
        self.router = nn.Linear(form.width, form.experts, bias=False)
        self.up = nn.Parameter(torch.empty(form.experts, form.width, form.hidden))
        self.down = nn.Parameter(torch.empty(form.experts, form.hidden, form.width))

    def forward(self, x: Tensor) -> Tensor:
        gates = softmax(self.router(x), dim=-1)
        place = torch.arange(self.places, device=x.device, dtype=x.dtype)
        mask = (gates[..., None] * place).flatten(2)
        held = (mask.transpose(1, 2) @ x).unflatten(1, (self.count, self.places))
        rows = held.transpose(0, 1).flatten(1, 2)
        made = gelu(rows @ self.up, approximate="tanh") @ self.down
        back = made.unflatten(1, (x.shape[0], self.places)).transpose(0, 1).flatten(1, 2)
        return mask @ back


class Block(nn.Module):
    """A norm before each part, a sum after it; in a mixture, two layers, the second with experts."""

    def __init__(self, form: Form, own: bool = True) -> None:
        super().__init__()
        norm = RMSNorm if form.llama else nn.LayerNorm
        self.norm1, self.norm2 = norm(form.width), norm(form.width)
        self.attention = PackedAttention(form)
        made = SwiGLU if form.llama else Feed
        self.feed: nn.Module = made(form.width, form.hidden) if own else Experts(form)
        self.after = Block(form, own=False) if own and form.experts else None
        self.drop1, self.drop2 = dropped(form), dropped(form)

    def forward(self, x: Tensor, by: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.drop1(self.attention(self.norm1(x), by))
        x = x + self.drop2(self.feed(self.norm2(x)))
        return x if self.after is None else self.after(x, by)


class Decoder(nn.Module):
    """Predicts the next token: tokens (batch, length) to logits (batch, predicted, vocabulary)."""

    def __init__(self, form: Form, blocks: int) -> None:
        super().__init__()
        self.size = form.width // form.heads
        self.predicted = form.predicted or form.length
        self.token = nn.Embedding(form.vocabulary, form.width)
        self.position = None if form.llama else nn.Embedding(form.length, form.width)
        self.blocks = nn.ModuleList(Block(form) for _ in range(blocks))
        self.norm = (RMSNorm if form.llama else nn.LayerNorm)(form.width)
        self.head = nn.Linear(form.width, form.vocabulary, bias=False)
        if form.tied:
            self.head.weight = self.token.weight

    def forward(self, x: Tensor) -> Tensor:
        out, by = self.token(x), None
        if self.position is None:
            by = rotation(x.shape[1], self.size, self.norm.weight)
        else:
            out = out + self.position(torch.arange(x.shape[1], device=x.device))
        for block in self.blocks:
            out = block(out, by)
        if self.predicted < out.shape[1]:
            out = out[:, : self.predicted]
        logits = self.head(self.norm(out))
        return logits.float()


def token_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Mean cross-entropy over the tokens that are predicted."""
    logits = model(batch["x"])
    return cross_entropy(logits.flatten(0, 1), batch["y"][:, : logits.shape[1]].flatten())
