"""AlexNet (Krizhevsky, 2014: "One weird trick for parallelizing convolutional neural networks")."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

import weft

# The trick: convolutions data parallel, the large linear layers split over the ranks.
LAYOUTS = {
    "linears.0.weight": weft.split(0),
    "linears.0.bias": weft.split(0),
    "linears.1.weight": weft.split(1),
}


class AlexNet(nn.Module):
    """Images [n, 3, side, side] -> logits [n, classes]; `side` is at least 63."""

    def __init__(
        self,
        classes: int = 1000,
        side: int = 224,
        channels: Sequence[int] = (64, 192, 384, 256, 256),
        hidden: int = 4096,
        dropout: float = 0.5,
    ) -> None:
        super().__init__()
        a, b, c, d, e = channels
        self.features = nn.Sequential(
            nn.Conv2d(3, a, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(a, b, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2),
            nn.Conv2d(b, c, 3, padding=1), nn.ReLU(),
            nn.Conv2d(c, d, 3, padding=1), nn.ReLU(),
            nn.Conv2d(d, e, 3, padding=1), nn.ReLU(), nn.MaxPool2d(3, 2),
        )  # fmt: skip
        left = (side - 7) // 4 + 1  # after the first convolution: 55 of 224
        for _ in range(3):
            left = (left - 3) // 2 + 1
        self.linears = nn.ModuleList(
            [
                nn.Linear(e * left * left, hidden),
                nn.Linear(hidden, hidden),
                nn.Linear(hidden, classes),
            ]
        )
        self.dropout = nn.Dropout(dropout)

    def forward(self, images: Tensor) -> Tensor:
        x = self.features(images).flatten(1)
        x = torch.relu(self.linears[0](self.dropout(x)))
        x = torch.relu(self.linears[1](self.dropout(x)))
        logits: Tensor = self.linears[2](x)
        return logits
