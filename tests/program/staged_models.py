"""Models in stages: skips, encoder and decoder, notes in the code; how they are cut; plain PyTorch beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import weft
from models import (
    GPT,
    GPT_COLUMNS,
    GPT_ROWS,
    MLP,
    ResNet,
    classification_loss,
    image_batch,
    token_batch,
    token_loss,
    vector_batch,
)
from single_device import adamw, plain_training
from weft.layout import Placement

STEPS = 3
S, B = weft.split, weft.broadcast
PAIR, LINE, GRID = [0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]]
TENSOR = weft.tensor_parallel(GPT_COLUMNS, GPT_ROWS)


def on(*ranks: Any) -> Placement:
    return weft.placement("cpu", list(ranks))


class UNet(nn.Module):
    """Two levels with skip connections: what the first layers make, and the input, the last ones read."""

    def __init__(self) -> None:
        super().__init__()
        self.down1, self.down2 = nn.Linear(8, 12), nn.Linear(12, 6)
        self.middle = nn.Linear(6, 6)
        self.up2, self.up1 = nn.Linear(12, 12), nn.Linear(32, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        wide = torch.tanh(self.down1(x))
        narrow = torch.tanh(self.down2(wide))
        middle = torch.tanh(self.middle(narrow))
        up = torch.tanh(self.up2(torch.cat([narrow, middle], 1)))
        out: torch.Tensor = self.up1(torch.cat([x, wide, up], 1))
        return out


class EncoderDecoder(nn.Module):
    """Every decoder layer reads the encoder's output; a mask and positions are used everywhere."""

    def __init__(self, layers: int = 3) -> None:
        super().__init__()
        self.embed = nn.Embedding(17, 16)
        self.encoder = nn.Linear(16, 16)
        self.queries = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.values = nn.ModuleList(nn.Linear(16, 16) for _ in range(layers))
        self.head = nn.Linear(16, 17)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        time = tokens.shape[1]
        mask = torch.arange(time)[:, None] >= torch.arange(time)[None, :]
        x = self.embed(tokens)
        memory = torch.relu(self.encoder(x))
        for query, value in zip(self.queries, self.values, strict=True):
            scores = query(x) @ memory.transpose(1, 2)
            scores = scores.masked_fill(~mask, float("-inf"))
            x = x + scores.softmax(-1) @ value(memory)
        logits: torch.Tensor = self.head(x)
        return logits


class Noted(nn.Module):
    """Stages as notes in the code, one in the middle of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with weft.stage(0):
            x = torch.tanh(self.first(x))
        with weft.stage(1):
            x = torch.tanh(self.second(x))
        with weft.stage(2):
            out: torch.Tensor = self.head(x + torch.tanh(self.third(x)))
        return out


Job = tuple[Callable[[], nn.Module], Any, Callable[..., Any], int]
JOBS: dict[str, Job] = {
    "mlp": (MLP, classification_loss, vector_batch, 8),
    "gpt": (lambda: GPT(layers=2), token_loss, token_batch, 4),
    "gpt4": (lambda: GPT(layers=4), token_loss, token_batch, 4),
    "tied": (lambda: GPT(layers=2, tied=True), token_loss, token_batch, 4),
    "resnet": (ResNet, classification_loss, image_batch, 4),
    "unet": (UNet, classification_loss, vector_batch, 8),
    "encoder": (EncoderDecoder, token_loss, token_batch, 4),
    "noted": (Noted, classification_loss, vector_batch, 8),
}
DATA: dict[str, Any] = {"batch": {"*": S(0)}, "parameters": {"*": B}}
FRONT, BACK = ["tokens", "positions", "blocks.0"], ["blocks.1.*", "norm", "head"]
DECODER = [["embed.*", "encoder", "*.0"], ["*.1"], ["*.2", "head"]]

CASES: dict[str, tuple[str, Any, weft.Strategy]] = {
    "mlp, by patterns": (
        "mlp",
        PAIR,
        weft.Strategy(
            batch={"*": S(0)}, stages=[weft.Stage(["hidden"], on(0)), weft.Stage(["head"], on(1))]
        ),
    ),
    "mlp, all deduced, the later stage first": (
        "mlp",
        PAIR,
        weft.Strategy(stages=[weft.Stage(["hidden"], on(1)), weft.Stage(["head.weight"], on(0))]),
    ),
    "gpt, four ranks in a row": ("gpt4", LINE, weft.Strategy(batch={"*": S(0)}, stages=4)),
    "gpt, two times data parallel": ("gpt", LINE, weft.Strategy(**DATA, stages=2)),
    "gpt, two times tensor parallel": (
        "gpt",
        GRID,
        weft.Strategy({"*": B}, TENSOR.parameters, stages=2),
    ),
    "gpt, interleaved": ("gpt4", PAIR, weft.Strategy(batch={"*": S(0)}, stages=4)),
    "gpt, 2 ranks then 1": (
        "gpt",
        [0, 1, 2],
        weft.Strategy(**DATA, stages=[weft.Stage(FRONT, on(0, 1)), weft.Stage(BACK, on(2))]),
    ),
    "gpt, 1 rank then 2": (
        "gpt",
        [0, 1, 2],
        weft.Strategy(**DATA, stages=[weft.Stage(FRONT, on(2)), weft.Stage(BACK, on(0, 1))]),
    ),
    "gpt, a grid then a line": (
        "gpt",
        [0, 1, 2, 3, 4, 5],
        weft.Strategy(
            batch={"x": (S(0), B), "y": S(0)},
            parameters=weft.hybrid_parallel(GPT_COLUMNS, GPT_ROWS).parameters,
            stages=[weft.Stage(FRONT, on(*GRID)), weft.Stage(BACK, on(4, 5))],
        ),
    ),
    "gpt, the head on all ranks": (
        "gpt",
        LINE,
        weft.Strategy(
            batch={"*": S(0)},
            parameters={"head.weight": S(0)},
            stages=[
                weft.Stage(FRONT, on(0, 1)),
                weft.Stage(["blocks.*"], on(2, 3)),
                weft.Stage(["norm", "head"], on(*LINE)),
            ],
        ),
    ),
    "tied gpt, two times data parallel": ("tied", LINE, weft.Strategy(**DATA, stages=2)),
    "tied gpt, split vocabulary": (
        "tied",
        LINE,
        weft.Strategy({"*": S(0)}, {"tokens.weight": S(0), "*": B}, stages=2),
    ),
    "resnet, two times data parallel": ("resnet", LINE, weft.Strategy(**DATA, stages=2)),
    "unet, a skip over a stage": (
        "unet",
        LINE,
        weft.Strategy(
            batch={"*": S(0)},
            stages=[
                weft.Stage(["down1"], on(0, 1)),
                weft.Stage(["down2", "middle"], on(2)),
                weft.Stage(["up?"], on(3)),
            ],
        ),
    ),
    "unet, each level a stage": (
        "unet",
        LINE,
        weft.Strategy(
            batch={"*": S(0)},
            stages=[
                weft.Stage(["down1", "up1"], on(0, 1)),
                weft.Stage(["down2", "up2"], on(2)),
                weft.Stage(["middle"], on(3)),
            ],
        ),
    ),
    "encoder and decoder": (
        "encoder",
        LINE,
        weft.Strategy(
            batch={"*": S(0)},
            stages=[
                weft.Stage(patterns, on(*ranks))
                for patterns, ranks in zip(DECODER, ([0, 1], [2], [3]), strict=True)
            ],
        ),
    ),
    "notes in the code": ("noted", [0, 1, 2], weft.Strategy(**DATA, stages=3)),
    "notes, then patterns": (
        "noted",
        [0, 1, 2],
        weft.Strategy(
            **DATA,
            stages=[weft.Stage([], on(0)), weft.Stage(["head"], on(1)), weft.Stage([], on(2))],
        ),
    ),
}


def plain(job: str, steps: int = STEPS) -> tuple[nn.Module, list[float], dict[str, Any]]:
    """A fresh model, and the losses and the state of its training on one device."""
    make_model, loss_fn, make_batch, size = JOBS[job]
    torch.manual_seed(0)
    model = make_model()
    batches = [make_batch(size, seed=seed) for seed in range(steps)]
    return model, *plain_training(model, loss_fn, batches)


def compiled(job: str, model: nn.Module, grid: Any, strategy: weft.Strategy) -> weft.Program:
    _, loss_fn, make_batch, size = JOBS[job]
    return weft.compile(
        model,
        loss_fn,
        adamw(model),
        make_batch(size),
        placement=weft.placement("cpu", grid),
        strategy=strategy,
        seed=5,
    )


def steps(job: str, program: weft.Program, count: int = STEPS) -> list[float]:
    _, _, make_batch, size = JOBS[job]
    return [program.step(make_batch(size, seed=seed)).item() for seed in range(count)]


def assert_state(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert list(found) == list(expected)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-10, atol=1e-11)
