"""Small models that many tests share: plain PyTorch, any size, any dtype, no weft inside."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

Batch = dict[str, torch.Tensor]

# Of the GPT's blocks, for tensor parallelism.
GPT_COLUMNS, GPT_ROWS = ("blocks.*.qkv", "blocks.*.up"), ("blocks.*.proj", "blocks.*.down")


class MLP(nn.Module):
    """Linear, ReLU, dropout, linear: [n, inputs] -> [n, classes]."""

    def __init__(
        self, inputs: int = 8, hidden: int = 16, classes: int = 4, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.hidden = nn.Linear(inputs, hidden)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(hidden, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.head(self.dropout(F.relu(self.hidden(x))))
        return out


class Attention(nn.Module):
    """Causal self-attention: [n, time, width] -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads = heads
        self.dropout = dropout
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, time, width = x.shape
        parts = self.qkv(x).split(width, dim=2)
        q, k, v = (
            part.view(n, time, self.heads, width // self.heads).transpose(1, 2) for part in parts
        )
        dropout = self.dropout if self.training else 0.0
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=dropout)
        proj: torch.Tensor = self.proj(out.transpose(1, 2).reshape(n, time, width))
        return proj


class Block(nn.Module):
    """Pre-norm transformer block: [n, time, width] -> the same."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads, dropout)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.dropout(self.attention(self.norm1(x)))
        out: torch.Tensor = x + self.dropout(self.down(F.gelu(self.up(self.norm2(x)))))
        return out


class GPT(nn.Module):
    """Decoder-only transformer: tokens int64 [n, time] -> logits [n, time, vocabulary]."""

    def __init__(
        self,
        vocabulary: int = 17,
        width: int = 16,
        layers: int = 2,
        heads: int = 2,
        context: int = 8,
        dropout: float = 0.0,
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, heads, dropout) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.tokens(tokens) + self.positions(places))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


class ResidualBlock(nn.Module):
    """Two convolutions with batch norm and a shortcut: [n, c, h, w] -> [n, channels, h/stride, w/stride]."""

    def __init__(self, inputs: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, channels, 3, stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == channels
            else nn.Sequential(
                nn.Conv2d(inputs, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(out + self.shortcut(x))


class ResNet(nn.Module):
    """Small residual network: images [n, 3, h, w] -> logits [n, classes]."""

    def __init__(self, channels: int = 4, classes: int = 5, blocks: int = 2) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)
        widths = [channels * 2**index for index in range(blocks)]
        self.blocks = nn.Sequential(
            *(
                ResidualBlock(inputs, width, 1 if width == channels else 2)
                for inputs, width in zip([channels, *widths], widths, strict=False)
            )
        )
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(widths[-1], classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks(F.relu(self.norm(self.conv(x))))
        logits: torch.Tensor = self.head(self.pool(x).flatten(1))
        return logits


def classification_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy of `model(batch["x"])` against the classes `batch["y"]`."""
    return F.cross_entropy(model(batch["x"]), batch["y"])


def token_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Mean cross-entropy over all tokens: `batch["x"]` and `batch["y"]` are int64 [n, time]."""
    return F.cross_entropy(model(batch["x"]).flatten(0, 1), batch["y"].flatten())


def vector_batch(
    n: int = 8,
    inputs: int = 8,
    classes: int = 4,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """A batch for `MLP`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, dtype=dtype, generator=generator)
    return {"x": x, "y": torch.randint(classes, (n,), generator=generator)}


def token_batch(n: int = 4, time: int = 8, vocabulary: int = 17, seed: int = 0) -> Batch:
    """A batch for `GPT`."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocabulary, (n, time + 1), generator=generator)
    return {"x": tokens[:, :-1].contiguous(), "y": tokens[:, 1:].contiguous()}


def image_batch(
    n: int = 4,
    size: int = 8,
    classes: int = 5,
    seed: int = 0,
    dtype: torch.dtype = torch.float64,
) -> Batch:
    """A batch for `ResNet`."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, size, size, dtype=dtype, generator=generator)
    return {"x": x, "y": torch.randint(classes, (n,), generator=generator)}
