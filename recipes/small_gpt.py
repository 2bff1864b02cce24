"""A small GPT, its data and its loss in plain PyTorch: all recipes train it."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, gelu, scaled_dot_product_attention
from torch.optim import AdamW
from torch.optim.lr_scheduler import CosineAnnealingLR
from torch.utils.data import Dataset

STEPS, BATCH, LENGTH, VOCABULARY, WIDTH, HEADS = 20, 12, 16, 64, 32, 4

# "x": the tokens, "y": the tokens that follow; both (batch, length), int64.
Batch = dict[str, Tensor]


class Progressions(Dataset[Batch]):
    """Rows a, a + d, a + 2 d, … modulo the vocabulary; the number of a row decides a and d."""

    def __len__(self) -> int:
        return 8 * BATCH

    def __getitem__(self, row: int) -> Batch:
        tokens = (7 * row + (row % 11 + 1) * torch.arange(LENGTH + 1)) % VOCABULARY
        return {"x": tokens[:-1], "y": tokens[1:]}


class Block(nn.Module):
    """Attention and a feed-forward net, each with a norm before it and a sum after it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """(batch, length, width) to the same shape."""
        parts = self.qkv(self.norm1(x)).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


class SmallGPT(nn.Module):
    """A decoder that predicts the next token."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.Sequential(Block(), Block())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Tokens (batch, length) to logits (batch, length, vocabulary)."""
        positions = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.token(x) + self.position(positions))))


def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
    """Mean cross-entropy of the next token."""
    return cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def make() -> tuple[SmallGPT, AdamW, CosineAnnealingLR]:
    """The model, the same in every process, its optimizer and the schedule of its learning rate."""
    torch.manual_seed(0)
    model = SmallGPT()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, CosineAnnealingLR(optimizer, STEPS)
