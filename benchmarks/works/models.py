"""Models that are not in `examples.models` as benchmarks need them: MLP, ResNet, an LSTM of cells, a large softmax."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from examples.models.resnet import ResNet


def mlp(width: int, layers: int, classes: int) -> nn.Sequential:
    """`layers` linear layers of `width` with ReLU behind each, and a last one."""
    hidden = [part for _ in range(layers) for part in (nn.Linear(width, width), nn.ReLU())]
    return nn.Sequential(*hidden, nn.Linear(width, classes))


def resnet(depths: Sequence[int], width: int, classes: int) -> ResNet:
    """A ResNet whose blocks add nothing to their shortcuts at first (Goyal et al., arXiv 1706.02677, section 5.1).

    Else a change of the last bit grows to per cents of the loss within two steps, and losses cannot be compared.
    """
    model = ResNet(depths, classes, width)
    for number in range(sum(depths)):
        nn.init.zeros_(model.get_parameter(f"blocks.{number}.norm3.weight"))
    return model


class Cells(nn.Module):
    """An LSTM language model as a loop over positions, for which PyTorch has no fused kernel."""

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


class Softmax(nn.Module):
    """Features (n, inputs) to logits (n, classes) of very many classes, such as faces."""

    def __init__(self, inputs: int, width: int, classes: int) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(inputs, width), nn.ReLU(), nn.Linear(width, width))
        self.head = nn.Linear(width, classes, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))
