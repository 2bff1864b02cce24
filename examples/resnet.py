"""A residual network on handwritten digits.

    weft run -n 2 examples/resnet.py --strategy space

Parallel in space: each rank has a strip of every image, and fetches the border rows that its convolutions see beyond.
The statistics of batch norm are those of all strips, and of all samples, whatever the strategy.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from example_data import learn_classes
from gallery import Run
from torch import Tensor, nn
from torch.nn.functional import relu

import weft

STRATEGIES = {
    "data": weft.data_parallel(),
    # Rows of pixels are dimension 2 of [n, channels, rows, columns].
    "space": weft.Strategy({"x": weft.split(2), "y": weft.broadcast}, {"*": weft.broadcast}),
}


class Residual(nn.Module):
    """Two convolutions and a shortcut: [n, inputs, h, w] to [n, outputs, h / stride, w / stride]."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(outputs), nn.BatchNorm2d(outputs)
        self.shortcut = nn.Identity() if stride == 1 else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(out + self.shortcut(x))


class DigitNet(nn.Module):
    """Images [n, 1, side, side] to logits [n, 10] (He et al. 2015, section 4.2)."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(
            Residual(width, width, 1),
            Residual(width, 2 * width, 2),
            Residual(2 * width, 4 * width, 2),
        )
        self.head = nn.Linear(4 * width, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.blocks(relu(self.norm(self.conv(images))))
        return self.head(x.mean((2, 3)))


def main(words: Sequence[str] | None = None) -> None:
    run = Run(__doc__, STRATEGIES, 100, words)
    torch.manual_seed(0)
    model = DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=5e-4)
    learn_classes(run, model, optimizer, side=16)


if __name__ == "__main__":
    main()
