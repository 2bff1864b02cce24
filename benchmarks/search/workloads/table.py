"""The six workloads by name: their models, batches, and the plans that experts write for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import final

import torch
from torch import Tensor, nn

import weft
from benchmarks.search.workloads.recurrent import (
    CLASSES,
    TIME,
    WORDS,
    Sequences,
    Translator,
    pair_loss,
)
from benchmarks.works.work import class_loss, token_loss
from examples.models.alexnet import AlexNet
from examples.models.images import loss as image_loss
from examples.models.inception import Inception
from examples.models.resnet import RESNET_101, ResNet

Batch = dict[str, Tensor]
SGD = partial(torch.optim.SGD, lr=1e-2, momentum=0.9)
PAIR_WORDS = 32_000
# Devices of a node of both clusters; experts put the layers of a recurrent net on them.
NODE = 4


@final
@dataclass(frozen=True)
class Workload:
    """A model with its batch for one device.

    Attributes:
        make: the model.
        batch: of so many samples.
        loss: of model and batch.
        samples: for each device.
        layers: patterns of the parts that experts put on devices of their own, in order; () where they do not.
        linears: patterns of the fully connected layers that "one weird trick" (arXiv 1404.5997) splits.
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], Batch]
    loss: Callable[[nn.Module, Batch], Tensor]
    samples: int = 64
    layers: Sequence[Sequence[str]] = ()
    linears: Sequence[str] = ()

    def job(self, devices: int) -> weft.Job:
        """Its step on so many devices, trained with SGD; on the meta device."""
        with torch.device("meta"):
            model, batch = self.make(), self.batch(self.samples * devices)
        return weft.Job(model, self.loss, SGD(model.parameters()), batch)

    def experts(self, devices: int, device_type: str) -> dict[str, weft.Strategy]:
        """The plans that experts write, by name."""
        found: dict[str, weft.Strategy] = {}
        if self.linears:
            cut = {
                f"{pattern}.{each}": weft.split(0)
                for pattern in self.linears
                for each in ("weight", "bias")
            }
            found["one weird trick"] = weft.Strategy(
                batch={"*": weft.split(0)}, parameters={**cut, "*": weft.broadcast}
            )
        if self.layers:
            found["a layer a device"] = self._by_layer(devices, device_type, 1)
            found["a layer a device, 4 micro-batches"] = self._by_layer(devices, device_type, 4)
        return found

    def _by_layer(self, devices: int, device_type: str, micro_batches: int) -> weft.Strategy:
        """Layers on the devices of each node, the batch over the nodes (Wu et al., arXiv 1609.08144, section 6)."""
        stages = tuple(
            weft.Stage(patterns, weft.placement(device_type, list(range(number, devices, NODE))))
            for number, patterns in enumerate(self.layers)
        )
        return weft.Strategy(
            batch={"*": weft.split(0)},
            parameters={"*": weft.broadcast},
            stages=stages,
            micro_batches=micro_batches,
        )


def images(side: int, samples: int) -> Batch:
    return {
        "images": torch.empty(samples, 3, side, side),
        "classes": torch.empty(samples, dtype=torch.int64),
    }


def texts(samples: int) -> Batch:
    tokens = torch.empty(samples, TIME, dtype=torch.int64)
    return {"x": tokens, "y": tokens}


def labelled(samples: int) -> Batch:
    return {
        "x": torch.empty(samples, TIME, dtype=torch.int64),
        "y": torch.empty(samples, dtype=torch.int64),
    }


def pairs(samples: int) -> Batch:
    tokens = torch.empty(samples, TIME, dtype=torch.int64)
    return {"source": tokens, "target": tokens, "y": tokens}


WORKLOADS: dict[str, Workload] = {
    "AlexNet": Workload(
        AlexNet, partial(images, 224), image_loss, samples=256, linears=["linears.*"]
    ),
    "Inception-v3": Workload(Inception, partial(images, 299), image_loss, linears=["head"]),
    "ResNet-101": Workload(
        partial(ResNet, RESNET_101), partial(images, 224), image_loss, linears=["head"]
    ),
    "RNNTC": Workload(
        partial(Sequences, 1024, 4, WORDS, CLASSES, last=True),
        labelled,
        class_loss,
        layers=[
            ["token", "stack.layers.0"],
            ["stack.layers.1"],
            ["stack.layers.2"],
            ["stack.layers.3", "head"],
        ],
    ),
    "RNNLM": Workload(
        partial(Sequences, 2048, 2, WORDS, WORDS, last=False),
        texts,
        token_loss,
        layers=[["token"], ["stack.layers.0"], ["stack.layers.1"], ["head"]],
    ),
    "NMT": Workload(
        partial(Translator, 1024, PAIR_WORDS),
        pairs,
        pair_loss,
        layers=[
            ["source", "encoder.layers.0"],
            ["encoder.layers.1", "target"],
            ["decoder.layers.0"],
            ["decoder.layers.1", "query", "joined", "head"],
        ],
    ),
}
