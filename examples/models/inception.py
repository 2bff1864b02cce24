"""Inception-v3 without its auxiliary head.

Szegedy et al. (2015): "Rethinking the inception architecture for computer vision".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import weft

# Output channels of the 1×1 convolutions at the front of every branch.
LAYOUTS = {"blocks.*.0.conv.weight": weft.split(0)}


class Unit(nn.Module):
    """Convolution without bias, batch norm, ReLU."""

    def __init__(
        self,
        inputs: int,
        outputs: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padded: bool = True,
    ) -> None:
        super().__init__()
        high, wide = (kernel, kernel) if isinstance(kernel, int) else kernel
        padding = (high // 2, wide // 2) if padded else 0
        self.conv = nn.Conv2d(inputs, outputs, (high, wide), stride, padding, bias=False)
        self.norm = nn.BatchNorm2d(outputs, eps=1e-3)

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.norm(self.conv(x)))


class Mixed(nn.Module):
    """Branches side by side, joined along the channels."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], dim=1)


def chain(
    inputs: int, *units: tuple[int, int | tuple[int, int]], last: nn.Module | None = None
) -> nn.Sequential:
    """Units (channels, kernel) one after the other; `last` stands at the end."""
    made: list[nn.Module] = []
    for outputs, kernel in units:
        made.append(Unit(inputs, outputs, kernel))
        inputs = outputs
    return nn.Sequential(*made, *([last] if last else []))


def pooled(inputs: int, outputs: int) -> nn.Sequential:
    """Average over neighbours, then 1×1."""
    return nn.Sequential(nn.AvgPool2d(3, 1, padding=1), Unit(inputs, outputs, 1))


def forked(inputs: int, outputs: int) -> Mixed:
    """1×3 beside 3×1."""
    return Mixed(Unit(inputs, outputs, (1, 3)), Unit(inputs, outputs, (3, 1)))


class Inception(nn.Module):
    """Images [n, 3, side, side] -> logits [n, classes]; `side` is at least 75.

    Args:
        width: even; all channels are multiples of its half (32 in the paper).
        repeats: blocks of each of the three resolutions.
    """

    def __init__(
        self,
        classes: int = 1000,
        width: int = 32,
        repeats: Sequence[int] = (3, 4, 2),
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        w = width
        self.stem = nn.Sequential(
            Unit(3, w, 3, stride=2, padded=False), Unit(w, w, 3, padded=False), Unit(w, 2 * w, 3), nn.MaxPool2d(3, 2),
            Unit(2 * w, 5 * w // 2, 1), Unit(5 * w // 2, 6 * w, 3, padded=False), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        blocks: list[nn.Module] = []
        channels = 6 * w
        for index in range(repeats[0]):
            blocks.append(_small(channels, w, w if index == 0 else 2 * w))
            channels = 8 * w if index == 0 else 9 * w
        blocks.append(_to_middle(channels, w))
        channels += 15 * w
        for index in range(repeats[1]):
            blocks.append(_middle(channels, w, w * (4, 5, 5, 6)[min(index, 3)]))
            channels = 24 * w
        blocks.append(_to_large(channels, w))
        channels += 16 * w
        for _ in range(repeats[2]):
            blocks.append(_large(channels, w))
            channels = 64 * w
        self.blocks = nn.Sequential(*blocks)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(self.stem(images)).mean((2, 3))
        logits: Tensor = self.head(self.dropout(x))
        return logits


def _small(inputs: int, w: int, ends: int) -> Mixed:
    """Kernels of 5 and of 3, at 35×35 in the paper."""
    return Mixed(
        chain(inputs, (2 * w, 1)),
        chain(inputs, (3 * w // 2, 1), (2 * w, 5)),
        chain(inputs, (2 * w, 1), (3 * w, 3), (3 * w, 3)),
        pooled(inputs, ends),
    )


def _to_middle(inputs: int, w: int) -> Mixed:
    return Mixed(
        Unit(inputs, 12 * w, 3, stride=2, padded=False),
        chain(inputs, (2 * w, 1), (3 * w, 3), last=Unit(3 * w, 3 * w, 3, stride=2, padded=False)),
        nn.MaxPool2d(3, 2),
    )


def _middle(inputs: int, w: int, inside: int) -> Mixed:
    """Kernels of 7, taken apart into 1×7 and 7×1, at 17×17 in the paper."""
    i, wide, high = inside, (1, 7), (7, 1)
    return Mixed(
        chain(inputs, (6 * w, 1)),
        chain(inputs, (i, 1), (i, wide), (6 * w, high)),
        chain(inputs, (i, 1), (i, high), (i, wide), (i, high), (6 * w, wide)),
        pooled(inputs, 6 * w),
    )


def _to_large(inputs: int, w: int) -> Mixed:
    return Mixed(
        chain(inputs, (6 * w, 1), last=Unit(6 * w, 10 * w, 3, stride=2, padded=False)),
        chain(
            inputs,
            (6 * w, 1),
            (6 * w, (1, 7)),
            (6 * w, (7, 1)),
            last=Unit(6 * w, 6 * w, 3, stride=2, padded=False),
        ),
        nn.MaxPool2d(3, 2),
    )


def _large(inputs: int, w: int) -> Mixed:
    """Wide branches at the lowest resolution, 8×8 in the paper."""
    return Mixed(
        chain(inputs, (10 * w, 1)),
        chain(inputs, (12 * w, 1), last=forked(12 * w, 12 * w)),
        chain(inputs, (14 * w, 1), (12 * w, 3), last=forked(12 * w, 12 * w)),
        pooled(inputs, 6 * w),
    )
