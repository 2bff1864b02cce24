"""Residual nets of 50 layers (arXiv 1512.03385, and wider ones, 1605.07146)."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn

_STAGES = (3, 4, 6, 3)
_EXPANDED = 4


@dataclass(frozen=True)
class Residual:
    """The sizes of a residual net of bottlenecks.

    Attributes:
        channels: of the first stage's bottlenecks, without widening.
        widening: how many times as many channels a bottleneck's second convolution makes.
        classes: of the last layer.
        side: of the square images.
    """

    channels: int = 64
    widening: int = 1
    classes: int = 1000
    side: int = 224


class Bottleneck(nn.Module):
    """Three convolutions with norms beside a shortcut: (batch, channels, height, width)."""

    def __init__(self, given: int, channels: int, widening: int, stride: int) -> None:
        super().__init__()
        middle, made = channels * widening, channels * _EXPANDED
        self.body = nn.Sequential(
            nn.Conv2d(given, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, middle, 3, stride, 1, bias=False),
            nn.BatchNorm2d(middle),
            nn.ReLU(),
            nn.Conv2d(middle, made, 1, bias=False),
            nn.BatchNorm2d(made),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or given != made:
            shorter = nn.Conv2d(given, made, 1, stride, bias=False)
            self.shortcut = nn.Sequential(shorter, nn.BatchNorm2d(made))
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.body(x) + self.shortcut(x))


class ResidualNet(nn.Module):
    """Images (batch, 3, side, side) to scores of classes (batch, classes)."""

    def __init__(self, sizes: Residual) -> None:
        super().__init__()
        channels = sizes.channels
        self.stem = nn.Sequential(
            nn.Conv2d(3, channels, 7, 2, 3, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.MaxPool2d(3, 2, 1),
        )
        given, parts = channels, []
        for stage, count in enumerate(_STAGES):
            made = channels << stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                parts.append(Bottleneck(given, made, sizes.widening, stride))
                given = made * _EXPANDED
        self.body = nn.Sequential(*parts)
        self.head = nn.Linear(given, sizes.classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.stem(x)).mean((2, 3)))
