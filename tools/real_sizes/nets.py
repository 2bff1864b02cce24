"""Families of `torch.nn` alone: ResNet, DiT and DLRM at published sizes; torch counts their work."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from examples.models import images, resnet
from tools.real_sizes import dit, dlrm
from tools.real_sizes.family import Batch, Family, Loss, MakeBatch, Shape, Work, matches


def counted(batch: MakeBatch, loss: Loss, blocks: tuple[str, ...]) -> Work:
    """Work as torch's own counter sees it when plain PyTorch trains on the meta device."""

    def work(shape: Shape, model: nn.Module) -> tuple[int, int]:
        one = batch(shape.sequences, shape.tokens)
        with FlopCounterMode(display=False) as forward:
            found = loss(model, one)
        with FlopCounterMode(display=False) as backward:
            torch.autograd.backward(found)
        head = f"{type(model).__name__}."
        inside = sum(
            sum(ops.values())
            for name, ops in forward.get_flop_counts().items()
            if matches(name.removeprefix(head), blocks) and name.count(".") == 2
        )
        return forward.get_total_flops() + backward.get_total_flops(), inside

    return work


def _dit(layers: int, tokens: int) -> nn.Module:
    with torch.device("meta"):
        return dit.DiT(layers)


def _resnet(layers: int, tokens: int) -> nn.Module:
    with torch.device("meta"):
        return resnet.ResNet()


def _pictures(sequences: int, tokens: int) -> Batch:
    with torch.device("meta"):
        pixels = torch.empty(sequences, 3, 224, 224)
        return {"images": pixels, "classes": torch.empty(sequences, dtype=torch.long)}


def _dlrm(layers: int, tokens: int) -> nn.Module:
    with torch.device("meta"):
        return dlrm.DLRM()


def _nothing(layers: int, tokens: int) -> int:
    return 0


_BLOCKS = ("blocks.*",)

NETS = (
    Family(
        "DiT-XL/2",
        "2212.09748, table 1",
        _dit,
        dit.batch,
        28,
        1152,
        _nothing,
        {"classes*": 0, "positions": 0},
        positions=lambda tokens: dit.POSITIONS,
        columns=("*.qkv.*", "*.up", "blocks.*.condition"),
        rows=("*.out", "*.down"),
        ends=0,
        blocks=_BLOCKS,
        loss=dit.loss,
        work=counted(dit.batch, dit.loss, _BLOCKS),
    ),
    Family(
        "ResNet-50",
        "1512.03385, table 1",
        _resnet,
        _pictures,
        16,
        2048,
        _nothing,
        {},
        tensor=1,
        blocks=_BLOCKS,
        crossing=lambda tokens: (512 * 28 * 28, 1024 * 14 * 14, 1024 * 14 * 14),
        loss=images.loss,
        work=counted(_pictures, images.loss, _BLOCKS),
    ),
    Family(
        "DLRM",
        "1906.00091; its repository's sizes for Criteo",
        _dlrm,
        dlrm.batch,
        1,
        dlrm.WIDTH * len(dlrm.ROWS),
        _nothing,
        {"tables.*": 0},
        tensor=1,
        lookups=("tables.*",),
        blocks=(),
        loss=dlrm.loss,
        work=counted(dlrm.batch, dlrm.loss, ()),
    ),
)
