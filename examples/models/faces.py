"""Face recognition with a softmax over very many identities (Wang et al., 2018: "CosFace: large margin cosine loss").

The head has a row for each identity and is split by rows over the ranks: each rank computes the logits of its own
identities, and only maxima and sums of rows travel. The logits are never whole on any rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

import weft
from examples.models.resnet import RESNET_101, ResNet

Batch = dict[str, Tensor]

LAYOUTS = {"head": weft.split(0)}


class FaceRecognition(nn.Module):
    """Images [n, 3, side, side] -> cosines [n, identities] of features and the head's rows."""

    def __init__(
        self,
        identities: int = 1_000_000,
        features: int = 512,
        layers: Sequence[int] = RESNET_101,
        width: int = 64,
    ) -> None:
        super().__init__()
        self.body = ResNet(layers, features, width)
        self.head = nn.Parameter(torch.randn(identities, features) / features**0.5)

    def forward(self, images: Tensor) -> Tensor:
        directions = functional.normalize(self.body(images))
        return functional.linear(directions, functional.normalize(self.head))


def loss(model: FaceRecognition, batch: Batch, scale: float = 30.0, margin: float = 0.35) -> Tensor:
    """CosFace: the cosine of the right identity must win by `margin`."""
    cosines = model(batch["images"])
    classes = batch["classes"]
    right = classes.unsqueeze(1) == torch.arange(cosines.shape[1], device=cosines.device)
    return functional.cross_entropy(scale * (cosines - margin * right), classes)
