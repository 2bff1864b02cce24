"""The smaller models: MLP, ResNet-50, LSTM language model, Wide&Deep and a softmax over many classes."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import relu


def mlp(width: int, layers: int, classes: int) -> nn.Sequential:
    """`layers` linear layers of `width` with ReLU behind each, and a last one."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


class Bottleneck(nn.Module):
    """1×1, 3×3 and 1×1 convolutions around a shortcut (He et al., arXiv 1512.03385, section 4.1).

    At first it adds nothing to the shortcut (Goyal et al., arXiv 1706.02677, section 5.1): else a change
    of the last bit grows to per cents of the loss within two steps, and losses cannot be compared.
    """

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(width), nn.BatchNorm2d(width)
        self.norm3 = nn.BatchNorm2d(outputs)
        nn.init.zeros_(self.norm3.weight)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride, bias=False)
            self.shortcut = nn.Sequential(convolution, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = relu(self.norm1(self.conv1(x)))
        out = relu(self.norm2(self.conv2(out)))
        return relu(self.norm3(self.conv3(out)) + self.shortcut(x))


class ResNet(nn.Module):
    """Images (n, 3, height, width) to logits (n, classes); depths (3, 4, 6, 3) make ResNet-50."""

    def __init__(self, depths: Sequence[int], width: int, classes: int) -> None:
        super().__init__()
        self.conv, self.norm = (
            nn.Conv2d(3, width, 7, 2, padding=3, bias=False),
            nn.BatchNorm2d(width),
        )
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        self.blocks, inputs = nn.Sequential(), width
        for stage, depth in enumerate(depths):
            for number in range(depth):
                stride = 2 if stage and not number else 1
                self.blocks.append(Bottleneck(inputs, width << stage, stride))
                inputs = 4 * (width << stage)
        self.head = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks(self.pool(relu(self.norm(self.conv(x)))))
        return self.head(x.mean((2, 3)))


class Language(nn.Module):
    """LSTM language model: tokens (batch, length) to logits (batch, length, vocabulary)."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.token(x))[0])


class Cells(nn.Module):
    """The same language model as a loop over positions, for which PyTorch has no fused kernel."""

    def __init__(self, vocabulary: int, width: int, layers: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.cells = nn.ModuleList(nn.LSTMCell(width, width) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        embedded = self.token(x)
        start = embedded.new_zeros(len(x), embedded.shape[2])
        states = [(start, start)] * len(self.cells)
        outputs = []
        for now in embedded.unbind(1):
            for layer, cell in enumerate(self.cells):
                states[layer] = cell(now, states[layer])
                now = states[layer][0]
            outputs.append(now)
        return self.head(torch.stack(outputs, dim=1))


class WideDeep(nn.Module):
    """Wide&Deep (Cheng et al., arXiv 1606.07792): a linear model over categories beside an MLP over embeddings.

    All fields share one table, as hashed categories do.
    """

    def __init__(self, rows: int, width: int, fields: int, numbers: int, hidden: int) -> None:
        super().__init__()
        self.wide_table, self.deep_table = nn.Embedding(rows, 1), nn.Embedding(rows, width)
        sizes = [fields * width + numbers, hidden, hidden // 2]
        layers = [
            part
            for inputs, outputs in pairwise(sizes)
            for part in (nn.Linear(inputs, outputs), nn.ReLU())
        ]
        self.deep = nn.Sequential(*layers, nn.Linear(sizes[-1], 1))

    def forward(self, categories: Tensor, numbers: Tensor) -> Tensor:
        """(n, fields), int64, and (n, numbers) to logits (n,)."""
        wide = self.wide_table(categories).sum((1, 2))
        deep = torch.cat([self.deep_table(categories).flatten(1), numbers], dim=1)
        return wide + self.deep(deep).squeeze(1)


class Softmax(nn.Module):
    """Features (n, inputs) to logits (n, classes) of very many classes, such as faces."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))
