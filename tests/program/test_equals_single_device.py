"""Whatever the strategy, five steps give the losses and parameters of plain PyTorch on one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
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
from single_device import adamw, assert_same_state, plain_training

pytestmark = pytest.mark.usefixtures("double_precision")

STEPS = 5
S, B = weft.split, weft.broadcast

MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Callable[..., Any]]] = {
    "mlp": (MLP, classification_loss, vector_batch),
    "gpt": (GPT, token_loss, token_batch),
    "tied gpt": (lambda: GPT(tied=True), token_loss, token_batch),
    "resnet": (ResNet, classification_loss, image_batch),
}

LINE, PAIR, GRID = [0, 1, 2, 3], [0, 1], [[0, 1], [2, 3]]

# Megatron-LM's cut of a transformer block; the fused projection is cut into rows of its output.

CASES: dict[str, tuple[str, Any, weft.Strategy, int]] = {
    "mlp, data parallel, 2": ("mlp", PAIR, weft.data_parallel(), 8),
    "mlp, data parallel, 4, uneven": ("mlp", LINE, weft.data_parallel(), 10),
    "mlp, columns then rows": ("mlp", PAIR, weft.tensor_parallel(["hidden"], ["head"]), 8),
    "mlp, the manual's hybrid": (
        "mlp",
        PAIR,
        weft.Strategy(batch={"*": S(0)}, parameters={"head.weight": S(0)}),
        8,
    ),
    "mlp, one SBP for both axes": (
        "mlp",
        GRID,
        weft.Strategy(batch={"*": S(0)}, parameters={"head.weight": S(0)}),
        8,
    ),
    "mlp, hybrid on a grid": ("mlp", GRID, weft.hybrid_parallel(["hidden"], ["head"]), 8),
    "gpt, data parallel, 2": ("gpt", PAIR, weft.data_parallel(), 4),
    "gpt, data parallel, 4": ("gpt", LINE, weft.data_parallel(), 4),
    "gpt, tensor parallel, 2": ("gpt", PAIR, weft.tensor_parallel(GPT_COLUMNS, GPT_ROWS), 4),
    "gpt, hybrid on a grid": ("gpt", GRID, weft.hybrid_parallel(GPT_COLUMNS, GPT_ROWS), 4),
    "gpt, sharded parameters": (
        "gpt",
        PAIR,
        weft.Strategy(batch={"*": S(0)}, parameters={"*.weight": S(0)}),
        4,
    ),
    "tied gpt, split vocabulary": (
        "tied gpt",
        PAIR,
        weft.Strategy(batch={"*": S(0)}, parameters={"tokens.weight": S(0)}),
        4,
    ),
    "gpt, all deduced": ("gpt", LINE, weft.Strategy(), 4),
    "resnet, data parallel, 2": ("resnet", PAIR, weft.data_parallel(), 4),
    "resnet, data parallel, 4, uneven": ("resnet", LINE, weft.data_parallel(), 6),
    "resnet, channels split": (
        "resnet",
        PAIR,
        weft.Strategy(batch={"*": B}, parameters={"blocks.*.conv?.weight": S(0)}),
        4,
    ),
    "resnet, hybrid on a grid": (
        "resnet",
        GRID,
        weft.Strategy(batch={"*": (S(0), B)}, parameters={"blocks.*.conv1.weight": (B, S(0))}),
        4,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_five_steps(case: str) -> None:
    name, grid, strategy, size = CASES[case]
    make_model, loss_fn, make_batch = MODELS[name]
    torch.manual_seed(0)
    model = make_model()
    batches = [make_batch(size, seed=seed) for seed in range(STEPS)]
    ranks = torch.tensor(grid).numel()
    losses, state = plain_training(model, loss_fn, batches)
    with weft.local_world(ranks):
        program = weft.compile(
            model,
            loss_fn,
            adamw(model),
            batches[0],
            placement=weft.placement("cpu", grid),
            strategy=strategy,
        )
        found = [program.step(batch).item() for batch in batches]
        assert found == pytest.approx(losses, rel=1e-10)
        assert_same_state(program.full_state_dict(), state)
        program.close()


class NormalizedDescent(torch.optim.Optimizer):
    """Steps of fixed length: the norm of a gradient is that of the whole tensor, so no shard can step alone."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter -= group["lr"] * parameter.grad / parameter.grad.norm()


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
    "sgd with momentum": lambda model: torch.optim.SGD(
        model.parameters(), lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01
    ),
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=1e-2),
    "adamw in groups": lambda model: torch.optim.AdamW(
        [
            {"params": [model.hidden.weight], "lr": 3e-2, "weight_decay": 0.0},
            {"params": [model.hidden.bias, *model.head.parameters()]},
        ],
        lr=1e-2,
        amsgrad=True,
    ),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-2, momentum=0.5),
    "adagrad": lambda model: torch.optim.Adagrad(
        model.parameters(), lr=1e-2, initial_accumulator_value=0.1
    ),
    "asgd": lambda model: torch.optim.ASGD(model.parameters(), lr=1e-1, t0=1),
    "rprop": lambda model: torch.optim.Rprop(model.parameters(), lr=1e-2),
    "the user's own, not element-wise": lambda model: NormalizedDescent(
        model.parameters(), lr=1e-1
    ),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_optimizers_on_shards(optimizer: str) -> None:
    torch.manual_seed(0)
    model = MLP()
    batches = [vector_batch(8, seed=seed) for seed in range(STEPS)]
    losses, state = plain_training(
        model, classification_loss, batches, make_optimizer=OPTIMIZERS[optimizer]
    )
    whole = optimizer.startswith("the user's own")
    sharded = weft.Strategy(batch={"*": S(0)}, parameters={"*": B if whole else S(0)})
    with weft.local_world(2):
        program = weft.compile(
            model,
            classification_loss,
            OPTIMIZERS[optimizer](model),
            batches[0],
            placement=weft.placement("cpu", PAIR),
            strategy=sharded,
        )
        assert [program.step(b).item() for b in batches] == pytest.approx(losses, rel=1e-10)
        assert_same_state(program.full_state_dict(), state)


def test_a_learning_rate_schedule_needs_no_recompilation() -> None:
    torch.manual_seed(0)
    model, batches = MLP(), [vector_batch(8, seed=seed) for seed in range(STEPS)]
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (model, plain)]
    schedules = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.5) for o in optimizers]
    with weft.local_world(2):
        program = weft.compile(
            model,
            classification_loss,
            optimizers[0],
            batches[0],
            placement=weft.placement("cpu", PAIR),
        )
        for batch in batches:
            program.step(batch)
            schedules[0].step()
            optimizers[1].zero_grad()
            classification_loss(plain, batch).backward()
            optimizers[1].step()
            schedules[1].step()
        assert_same_state(program.full_state_dict(), plain.state_dict())


def test_training_goes_on_with_the_states_that_the_optimizer_has() -> None:
    torch.manual_seed(0)
    model = MLP()
    optimizer = adamw(model)
    for seed in range(2):
        optimizer.zero_grad()
        classification_loss(model, vector_batch(8, seed=seed)).backward()
        optimizer.step()
    batches = [vector_batch(8, seed=seed) for seed in range(2, 5)]
    plain, other = copy.deepcopy((model, optimizer))
    sharded = weft.Strategy(batch={"*": S(0)}, parameters={"*.weight": S(0)})
    with weft.local_world(2):
        program = weft.compile(
            model,
            classification_loss,
            optimizer,
            batches[0],
            placement=weft.placement("cpu", PAIR),
            strategy=sharded,
        )
        found = [program.step(batch).item() for batch in batches]
        losses = []
        for batch in batches:
            other.zero_grad()
            loss = classification_loss(plain, batch)
            loss.backward()
            other.step()
            losses.append(loss.item())
        assert found == pytest.approx(losses, rel=1e-10)
        assert_same_state(program.full_state_dict(), plain.state_dict())
