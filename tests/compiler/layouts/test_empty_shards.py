"""Splits finer than their dimension: ranks with empty shards train as one device does."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import weft
from models import GPT, MLP, classification_loss, image_batch, token_batch, token_loss, vector_batch

pytestmark = pytest.mark.usefixtures("double_precision")

STEPS = 3
S, B = weft.split, weft.broadcast
LINE, GRID = [0, 1, 2, 3], [[0, 1], [2, 3]]


class Table(nn.Module):
    """An embedding of 3 rows, a normalisation and a head: [n, 5] -> [n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(3, 6)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.norm(self.table((x[:, :5] > 0).long() + (x[:, :5] > 1).long()))
        out: torch.Tensor = self.head(rows.amax(1) + rows.prod(1))
        return out


class Net(nn.Module):
    """Convolutions with few channels, batch and group norm, pooling: [n, 3, 8, 8] -> [n, 4]."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.bn = nn.BatchNorm2d(3)
        self.second = nn.Conv2d(3, 6, 3, padding=1, bias=False)
        self.gn = nn.GroupNorm(3, 6)
        self.head = nn.Linear(6 * 4 * 4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.first(x)))
        x = F.max_pool2d(F.silu(self.gn(self.second(x))), 2)
        out: torch.Tensor = self.head(x.flatten(1))
        return out


class Hinted(nn.Module):
    """A hidden layer of 3 that a hint splits."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden = nn.Linear(8, 3)
        self.head = nn.Linear(3, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = weft.hint(self.hidden(x), sbp=weft.split(1))
        out: torch.Tensor = self.head(torch.softmax(torch.tanh(hidden), 1))
        return out


class Heads(nn.Module):
    """Attention whose 3 heads a hint splits: [n, 8] -> [n, 4]."""

    def __init__(self, causal: bool = False) -> None:
        super().__init__()
        self.causal = causal
        self.qkv = nn.Linear(1, 36)
        self.head = nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, time = x.shape
        parts = self.qkv(x.unsqueeze(2)).chunk(3, 2)
        q, k, v = (
            weft.hint(part.view(n, time, 3, 4).transpose(1, 2), sbp=weft.split(1)) for part in parts
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        logits: torch.Tensor = self.head(out.transpose(1, 2).reshape(n, time, 12).mean(1))
        return logits


def images(n: int, seed: int) -> dict[str, torch.Tensor]:
    return image_batch(n, classes=4, seed=seed)


def pinned(**layouts: Any) -> weft.Strategy:
    """The layouts of the batch (Broadcast by default), of its images, and of parameters, `_` for a dot."""
    batch, x = {"*": layouts.pop("batch", B)}, layouts.pop("x", None)
    return weft.Strategy(
        batch=batch if x is None else {"x": x, **batch},
        parameters={key.replace("_", "."): sbp for key, sbp in layouts.items()},
    )


Make = tuple[Callable[[], nn.Module], Any, Callable[..., Any]]
NARROW: Make = (lambda: MLP(hidden=3), classification_loss, vector_batch)
WIDE: Make = (MLP, classification_loss, vector_batch)
SMALL: Make = (lambda: GPT(width=12, heads=3), token_loss, token_batch)
ROWS: Make = (Table, classification_loss, vector_batch)
IMAGES: Make = (Net, classification_loss, images)
CASES: dict[str, tuple[Make, Any, weft.Strategy, int]] = {
    "batch of 3": (WIDE, LINE, weft.data_parallel(), 3),
    "batch of 1": (WIDE, LINE, weft.data_parallel(), 1),
    "batch of 3 on a grid": (WIDE, GRID, pinned(batch=S(0)), 3),
    "batch of 3, hybrid": (
        WIDE,
        [[0, 1], [2, 3], [4, 5], [6, 7]],
        weft.hybrid_parallel(["hidden"], ["head"]),
        3,
    ),
    "hidden of 3, columns and rows": (
        NARROW,
        LINE,
        weft.tensor_parallel(["hidden"], ["head"]),
        4,
    ),
    "hidden of 3 on a grid": (NARROW, GRID, pinned(hidden_weight=S(0), head_weight=S(1)), 4),
    "hidden of 3 stored in pieces": (NARROW, LINE, pinned(batch=S(0), hidden_weight=S(0)), 4),
    "hint of 3": ((Hinted, classification_loss, vector_batch), LINE, weft.Strategy(), 4),
    "3 heads": ((Heads, classification_loss, vector_batch), LINE, weft.Strategy(), 4),
    "3 causal heads": (
        (lambda: Heads(causal=True), classification_loss, vector_batch),
        LINE,
        pinned(batch=B),
        2,
    ),
    "gpt, batch of 3": (SMALL, LINE, weft.data_parallel(), 3),
    "gpt, 3 heads": (
        SMALL,
        LINE,
        weft.tensor_parallel(("blocks.*.qkv", "blocks.*.up"), ("blocks.*.proj", "blocks.*.down")),
        2,
    ),
    "table of 3 rows": (ROWS, LINE, pinned(table_weight=S(0)), 4),
    "table of 3 rows, batch of 3": (ROWS, LINE, pinned(batch=S(0), table_weight=S(0)), 3),
    "classes of 4 on 5": (WIDE, [0, 1, 2, 3, 4], pinned(head_weight=S(0), head_bias=S(0)), 4),
    "images, batch of 3": (IMAGES, LINE, weft.data_parallel(), 3),
    "images, 3 channels": (IMAGES, LINE, pinned(first_weight=S(0), second_weight=S(1)), 4),
    "images, 3 channels of norms": (IMAGES, LINE, pinned(bn_weight=S(0), gn_weight=S(0)), 4),
    "images, 3 input channels": (IMAGES, LINE, pinned(x=S(1), first_weight=S(1)), 4),
}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, eps=1e-4),
    "foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, eps=1e-4),
}


def trained(
    make: Make, grid: Any, strategy: weft.Strategy, size: int, optimizer: str = "adamw"
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The program after some steps, whose losses are plain PyTorch's, and the state that it must have."""
    make_model, loss_fn, make_batch = make
    torch.manual_seed(0)
    model = make_model()
    plain = copy.deepcopy(model)
    reference = OPTIMIZERS[optimizer](plain.parameters())
    batches = [make_batch(size, seed=seed) for seed in range(STEPS)]
    placement = weft.placement("cpu", grid)
    program = weft.compile(
        model,
        loss_fn,
        OPTIMIZERS[optimizer](model.parameters()),
        batches[0],
        placement=placement,
        strategy=strategy,
    )
    for batch in batches:
        reference.zero_grad()
        loss = loss_fn(plain, batch)
        loss.backward()
        reference.step()
        assert abs(float(program.step(batch)) - loss.item()) <= 1e-10
    return program, plain.state_dict()


def layouts(program: Any) -> dict[str, str]:
    """Of the inputs by name, and of what ops make (the last call of each)."""
    row = re.compile(r"(?:parameter|batch|\d+) +(\S+) +\w+\[.*?\] +(\(.*?\)) ")
    return dict(
        found.groups()
        for line in program.explain(details=True).splitlines()
        if (found := row.match(line))
    )


def same_state(program: Any, expected: dict[str, torch.Tensor]) -> None:
    found = program.full_state_dict()
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-30)
        assert ((found[name] - value).abs().max() / scale).item() <= 1e-10, name


@pytest.mark.parametrize("case", CASES)
def test_empty_shards_train_as_one_device(case: str) -> None:
    make, grid, strategy, size = CASES[case]
    with weft.local_world(torch.tensor(grid).numel()):
        program, expected = trained(make, grid, strategy, size)
        same_state(program, expected)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_every_optimizer_takes_empty_shards(optimizer: str) -> None:
    strategy = pinned(hidden_weight=S(0), hidden_bias=S(0), head_weight=S(1))
    with weft.local_world(4):
        program, expected = trained(NARROW, LINE, strategy, 4, optimizer)
        same_state(program, expected)


def test_deduction_chooses_no_thin_split_by_itself() -> None:
    """A hidden layer of 3 may be split over 4 ranks where the strategy says so, and stays whole elsewhere."""
    with weft.local_world(4):
        free, _ = trained(NARROW, LINE, weft.data_parallel(), 8)
        columns, _ = trained(NARROW, LINE, weft.tensor_parallel(["hidden"], ["head"]), 8)
    assert layouts(free)["hidden.weight"] == "(B)"
    assert layouts(columns)["hidden.weight"] == layouts(columns)["hidden.bias"] == "(S(0))"
    assert layouts(columns)["aten.relu.default"] == "(S(1))"


def test_thin_splits_spread_along_their_dimension_alone() -> None:
    """Of a batch of 3 on 4 ranks, what carries the batch may be split thinly, and no weight may."""
    from_batch = weft.Strategy(batch={"*": S(0)})
    with weft.local_world(4):
        program, _ = trained(NARROW, LINE, from_batch, 3)
    assert layouts(program)["x"] == layouts(program)["aten.relu.default"] == "(S(0))"
    assert layouts(program)["hidden.weight"] == "(B)"
