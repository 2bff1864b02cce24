"""ResNet-50 and -101 (He et al., 2015: "Deep residual learning for image recognition")."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional

import weft

RESNET_50, RESNET_101 = (3, 4, 6, 3), (3, 4, 23, 3)

# Output channels of the first two convolutions of each block.
LAYOUTS = {"blocks.*.conv1.weight": weft.split(0), "blocks.*.conv2.weight": weft.split(0)}


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions and a shortcut: [n, inputs, h, w] -> [n, 4 width, h/stride, w/stride]."""

    def __init__(self, inputs: int, width: int, stride: int, widening: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, widening * width, 3, stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(widening * width)
        self.conv3 = nn.Conv2d(widening * width, 4 * width, 1, bias=False)
        self.norm3 = nn.BatchNorm2d(4 * width)
        self.shortcut: nn.Module = nn.Identity()
        if stride > 1 or inputs != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = functional.relu(self.norm1(self.conv1(x)))
        out = functional.relu(self.norm2(self.conv2(out)))
        return functional.relu(self.norm3(self.conv3(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images [n, 3, side, side] -> logits [n, classes].

    Args:
        layers: blocks of each of the four stages.
        classes: how many.
        width: channels after the first convolution; a stage has twice as many as the one before.
        widening: how many times as many channels a block's second convolution makes (Zagoruyko and Komodakis, 2016).
    """

    def __init__(
        self,
        layers: Sequence[int] = RESNET_50,
        classes: int = 1000,
        width: int = 64,
        widening: int = 1,
    ) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.norm = nn.BatchNorm2d(width)
        blocks, inputs = [], width
        for stage, count in enumerate(layers):
            for index in range(count):
                inside = width * 2**stage
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(inputs, inside, stride, widening))
                inputs = 4 * inside
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)

    def features(self, images: Tensor) -> Tensor:
        """Means over the places: [n, channels]."""
        x = functional.relu(self.norm(self.conv(images)))
        x = self.blocks(functional.max_pool2d(x, 3, 2, padding=1))
        means: Tensor = x.mean((2, 3))
        return means

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.features(images))
        return logits
