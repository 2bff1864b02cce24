"""ZeRO 1, 2 and 3: the steps of plain PyTorch, with states, gradients and parameters in shards."""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, ResNet, classification_loss, image_batch, token_batch, token_loss
from single_device import assert_same_training, compiled, plain_training
from weft.compiler.context import Context
from weft.ir.logical import Box, Input
from weft.units import ITEM_SIZE

pytestmark = pytest.mark.usefixtures("double_precision")

S, B = weft.split, weft.broadcast
PAIR, LINE, GRID = [0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]]
COLUMNS, ROWS = ("blocks.*.qkv", "blocks.*.up"), ("blocks.*.proj", "blocks.*.down")
DATA = weft.data_parallel()
HYBRID = weft.hybrid_parallel(COLUMNS, ROWS)
STAGES = replace(DATA, stages=2)

MODELS: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (GPT, token_loss, token_batch),
    "tied gpt": (lambda: GPT(tied=True), token_loss, token_batch),
    "resnet": (ResNet, classification_loss, image_batch),
}
CASES: dict[str, tuple[str, Any, weft.Strategy, weft.Zero]] = {
    "gpt, 1": ("gpt", PAIR, DATA, weft.Zero(1)),
    "gpt, 2 along the axis of tensor parallelism": ("gpt", GRID, HYBRID, weft.Zero(2, axis=1)),
    "gpt, 3 beside tensor parallelism": ("gpt", GRID, HYBRID, weft.Zero(3)),
    "tied gpt, 3": ("tied gpt", LINE, DATA, weft.Zero(3)),
    "tied gpt, 3 in two stages": ("tied gpt", LINE, STAGES, weft.Zero(3)),
    "gpt, 2, micro-batches": ("gpt", PAIR, replace(DATA, micro_batches=2), weft.Zero(2)),
    "tied gpt, 3 in two stages, micro-batches": (
        "tied gpt",
        LINE,
        replace(STAGES, micro_batches=2),
        weft.Zero(3),
    ),
    "gpt, 3, all else deduced": ("gpt", LINE, weft.Strategy(), weft.Zero(3)),
    "resnet, 2, uneven": ("resnet", [0, 1, 2], DATA, weft.Zero(2)),
}


@pytest.mark.parametrize("case", CASES)
def test_sharded_steps(case: str) -> None:
    name, grid, strategy, zero = CASES[case]
    make_model, loss_fn, make_batch = MODELS[name]
    torch.manual_seed(0)
    model = make_model()
    batches = [make_batch(4 if name != "resnet" else 6, seed=seed) for seed in range(3)]
    expected = plain_training(model, loss_fn, batches)
    with compiled(model, loss_fn, batches[0], grid, replace(strategy, zero=zero)) as program:
        before = loss_fn(model.eval(), batches[0]).item()
        evaluation = program.evaluation(loss_fn, batches[0])
        assert evaluation.step(batches[0]).item() == pytest.approx(before, rel=1e-10)
        model.train()
        assert_same_training(program, batches, expected)


def test_bytes_of_each_level() -> None:
    """A quarter lies on each rank; parameters are gathered once or twice, gradients scattered once."""
    torch.manual_seed(0)
    model = GPT(vocabulary=16)
    size = sum(parameter.numel() * 8 for parameter in model.parameters())
    for level in (1, 2, 3):
        strategy = replace(DATA, zero=weft.Zero(level))  # type: ignore[arg-type]
        with compiled(model, token_loss, token_batch(4), LINE, strategy) as program:
            assert held_bytes(program, "parameter") == size // 4
            assert held_bytes(program, "state") == 2 * size // 4
            moved = boxed_bytes(program)
        assert moved["P-S"] == size
        assert moved["P-B"] < 100  # the loss
        # Embeddings and biases are not read in the backward.
        assert moved["S-B"] == size if level < 3 else 1.5 * size < moved["S-B"] < 2 * size


def test_when_gradients_are_reduced_and_parameters_gathered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Level 1 reduces sums over the micro-batches, 2 each of them; 3 gathers in each of them.

    In buckets that are small beside the model, as those of large models are.
    """
    monkeypatch.setattr(Context, "bucket_bytes", 1024)
    peaks = []
    for level, reduced_in_loop, gathered_in_loop in ((1, 0, 0), (2, 1, 0), (3, 1, 1)):
        strategy = replace(DATA, micro_batches=2, zero=weft.Zero(level))  # type: ignore[arg-type]
        with compiled(GPT(layers=4), token_loss, token_batch(4), PAIR, strategy) as program:
            graph = program.graph
            peaks.append(program.memory().ranks[0].predicted.peak)
        loop = graph.loop
        weights = [box for box in graph.of_kind(Box) if box.output.shape == (64, 16)]
        kinds = {
            (str(graph.values[box.input.name].layout.sbp[0])[0], box.output.name in loop)
            for box in weights
        }
        assert kinds == {("P", bool(reduced_in_loop)), ("S", bool(gathered_in_loop))}
    assert peaks[0] > 1.1 * peaks[1]
    assert peaks[1] > 1.1 * peaks[2]


class Across(nn.Module):
    """Linear layers around an op over the whole batch."""

    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.middle(self.op(self.first(x)))))


OVER_THE_BATCH = {
    "mean": lambda h: h - h.mean(0),
    "sort": lambda h: h.sort(0).values,
    "attention": lambda h: (h @ h.T).softmax(-1) @ h,
    "sort of what is centred": lambda h: (h - h.mean(0)).sort(0).values,
}


def contrastive(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """A loss of each sample beside all others."""
    sides = nn.functional.normalize(model(batch), dim=-1)
    return nn.functional.cross_entropy(sides @ sides.T, torch.arange(len(sides)))


def test_level_3_in_stages_with_a_loss_over_the_batch() -> None:
    """What the last stage gathers for forward and backward holds no micro-batch up that the loss waits for."""
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(8)]
    model, batch = nn.Sequential(*layers), torch.randn(16, 8)
    expected = plain_training(model, contrastive, [batch] * 3)
    strategy = replace(STAGES, micro_batches=2, zero=weft.Zero(3))
    with compiled(model, contrastive, batch, GRID, strategy) as program:
        assert_same_training(program, [batch] * 3, expected)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("name", OVER_THE_BATCH)
def test_level_3_with_ops_over_the_batch(name: str, micro_batches: int) -> None:
    """Micro-batches wait for one another between two gathers; none is held back by a later one."""
    torch.manual_seed(0)
    model, batch = Across(OVER_THE_BATCH[name]), torch.randn(8, 6)
    expected = plain_training(model, squares, [batch] * 3)
    strategy = replace(DATA, micro_batches=micro_batches, zero=weft.Zero(3))
    with compiled(model, squares, batch, PAIR, strategy) as program:
        assert_same_training(program, [batch] * 3, expected)


class Block(nn.Module):
    """A residual block with an op over the batch between its parameters, which are gathered together."""

    def __init__(self, op: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(
            6, bias=False
        )  # a mean that is taken away takes its gradient along
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.op = op

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = x + self.down(torch.tanh(self.up(self.op(self.norm(x)))))
        return made


@pytest.mark.parametrize("names", [("sort", "mean"), ("mean", "sort"), ("mean", "mean")])
def test_level_3_with_ops_over_the_batch_within_blocks(names: tuple[str, ...]) -> None:
    """A sum over micro-batches that is read in the loop makes them wait, too."""
    torch.manual_seed(0)
    blocks = [Block(OVER_THE_BATCH[name]) for name in names]
    model, batch = nn.Sequential(nn.Linear(6, 6), *blocks, nn.Linear(6, 6)), torch.randn(8, 6)
    expected = plain_training(model, squares, [batch] * 3)
    strategy = replace(DATA, micro_batches=2, zero=weft.Zero(3))
    with compiled(model, squares, batch, PAIR, strategy) as program:
        assert_same_training(program, [batch] * 3, expected)


def squares(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


def held_bytes(program: weft.Program, role: str) -> int:
    """What the first rank holds of a role, but for numbers such as the count of steps."""
    shapes = (
        given.value.layout.local_shape(given.value.shape, 0)
        for given in program.graph.of_kind(Input)
        if given.role == role and given.value.layout is not None
    )
    return sum(8 * math.prod(shape) for shape in shapes if shape)


def boxed_bytes(program: weft.Program) -> Counter[str]:
    """Whole sizes of what is boxed, by kinds of layouts, such as "S-B"."""
    found: Counter[str] = Counter()
    for box in program.graph.of_kind(Box):
        source = program.graph.values[box.input.name]
        kinds = (str(value.layout.sbp[0])[0] for value in (source, box.output))
        found["-".join(kinds)] += math.prod(source.shape) * ITEM_SIZE[source.dtype]
    return found


@pytest.mark.parametrize("at_first", [True, False], ids=["frozen", "thawed"])
def test_a_layer_is_frozen_or_thawed_whose_update_needs_it_whole(at_first: bool) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    model[0].requires_grad_(at_first)
    optimizer, batch = torch.optim.Adafactor(model.parameters()), torch.randn(8, 4)
    plain, plain_optimizer = copy.deepcopy((model, optimizer))

    def loss_fn(model: Any, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = model(x).square().mean()
        return result

    options: Any = {
        "placement": weft.placement("cpu", PAIR),
        "strategy": weft.Strategy(zero=weft.Zero(3)),
    }
    with weft.local_world(2):
        program = weft.compile(model, loss_fn, optimizer, batch, **options)
        for trained in (at_first, not at_first, at_first):
            for each in (model, plain):
                each[0].requires_grad_(trained)
            if trained and not at_first:  # it lies in shards
                with pytest.raises(
                    weft.errors.StrategyError, match=r"0\.weight lies in parts.*compile first"
                ):
                    program.step(batch)
                program.close()
                program = weft.compile(model, loss_fn, optimizer, batch, **options)
            loss = loss_fn(plain, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            plain_optimizer.step()
            plain_optimizer.zero_grad()
            assert program.step(batch).item() == pytest.approx(loss.item(), rel=1e-10)
        program.close()
