"""Small graphs, whose every layout can be planned: LeNet, and a recurrent language model of two steps."""

from __future__ import annotations

from typing import Any, final

import torch
from torch import Tensor, nn
from torch.nn.functional import max_pool2d, relu

import weft
from benchmarks.works.work import class_loss


@final
class LeNet(nn.Module):
    """Two convolutions and three linear layers (LeCun et al. 1998), on images of 28 x 28."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 6, 5), nn.Conv2d(6, 16, 5)
        self.linear1, self.linear2 = nn.Linear(256, 120), nn.Linear(120, 84)
        self.linear3 = nn.Linear(84, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of classes [samples, 10], of images [samples, 1, 28, 28]."""
        x = max_pool2d(relu(self.conv1(x)), 2)
        x = max_pool2d(relu(self.conv2(x)), 2)
        found: Tensor = self.linear3(relu(self.linear2(relu(self.linear1(x.flatten(1))))))
        return found


@final
class UnrolledTwice(nn.Module):
    """A recurrent language model of two steps; its cell is a layer of each of its inputs."""

    def __init__(self, words: int, width: int) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(words, width), nn.Linear(width, words)
        self.into, self.over = nn.Linear(width, width), nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Scores of the next words [samples, words], of two words [samples, 2]."""
        first = torch.tanh(self.into(self.embed(x[:, 0])))
        second = torch.tanh(self.into(self.embed(x[:, 1])) + self.over(first))
        found: Tensor = self.head(second)
        return found


def lenet(samples: int) -> weft.Job:
    """LeNet, trained by SGD."""
    batch = {"x": torch.randn(samples, 1, 28, 28), "y": torch.randint(10, (samples,))}
    return _job(LeNet(), batch)


def rnnlm(samples: int, words: int = 1000, width: int = 256) -> weft.Job:
    """The language model of two steps, trained by SGD."""
    batch = {"x": torch.randint(words, (samples, 2)), "y": torch.randint(words, (samples,))}
    return _job(UnrolledTwice(words, width), batch)


def _job(model: nn.Module, batch: Any) -> weft.Job:
    return weft.Job(model, class_loss, torch.optim.SGD(model.parameters(), lr=0.1), batch)
