"""Mixed precision: plain PyTorch under autocast, with float32 parameters and states."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, ResNet, classification_loss, image_batch, token_batch, token_loss
from single_device import adamw, compiled
from weft.ir.logical import Box, Call, Input

S, B = weft.split, weft.broadcast
DATA = weft.data_parallel()
MODELS: dict[str, tuple[Any, Any, Any]] = {
    "gpt": (GPT, token_loss, token_batch),
    "resnet": (ResNet, classification_loss, image_batch),
}


def batches_of(make_batch: Any, count: int = 3) -> list[dict[str, torch.Tensor]]:
    every = (make_batch(8, seed=seed) for seed in range(count))
    return [
        {key: x.float() if x.is_floating_point() else x for key, x in batch.items()}
        for batch in every
    ]


def autocast_training(
    model: nn.Module, loss_fn: Any, batches: list[Any], dtype: torch.dtype
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Losses and final state of plain PyTorch under autocast."""
    model = copy.deepcopy(model)
    optimizer = adamw(model)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=dtype):
            loss = loss_fn(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, model.state_dict()


def difference(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> float:
    """The largest, relative to the largest element of its tensor."""
    return max(
        ((found[name] - value).abs().max() / value.abs().max().clamp(min=1e-6)).item()
        for name, value in expected.items()
    )


@pytest.mark.parametrize("name", MODELS)
def test_bf16_on_one_rank_is_autocast(name: str) -> None:
    make_model, loss_fn, make_batch = MODELS[name]
    torch.manual_seed(0)
    model, batches = make_model(), batches_of(make_batch)
    losses, state = autocast_training(model, loss_fn, batches, torch.bfloat16)
    with compiled(model, loss_fn, batches[0], [0], weft.Strategy(precision="bf16")) as program:
        assert [program.step(batch).item() for batch in batches] == pytest.approx(losses, rel=1e-5)
        assert difference(program.full_state_dict(), state) < 1e-5
        evaluation = program.evaluation(loss_fn, batches[0])
        assert "bfloat16" in str(evaluation.graph)


@pytest.mark.parametrize("level", [None, 3])
def test_bf16_on_two_ranks(level: int | None) -> None:
    torch.manual_seed(0)
    model, batches = GPT(), batches_of(token_batch)
    losses, state = autocast_training(model, token_loss, batches, torch.bfloat16)
    zero = weft.Zero(level) if level else None  # type: ignore[arg-type]
    strategy = replace(DATA, precision="bf16", zero=zero)
    with compiled(model, token_loss, batches[0], [0, 1], strategy) as program:
        assert [program.step(batch).item() for batch in batches] == pytest.approx(losses, rel=2e-3)
        assert difference(program.full_state_dict(), state) < 2e-2
        graph = program.graph
        assert {n.value.dtype for n in graph.of_kind(Input) if n.role != "batch"} == {"float32"}
        products = [call for call in graph.of_kind(Call) if "mm" in call.op]
        assert {value.dtype for call in products for value in call.outputs if value} == {"bfloat16"}
        if level == 3:  # weights travel as bf16
            moved = [box.output for box in graph.of_kind(Box) if box.output.shape == (64, 16)]
            assert {value.dtype for value in moved} == {"bfloat16"}


def scaled_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Cross-entropy times a factor of the batch: a large one makes gradients overflow."""
    loss: torch.Tensor = token_loss(model, batch) * batch["factor"].mean()
    return loss


def grad_scaler_training(
    model: nn.Module, batches: list[Any], max_norm: float
) -> tuple[list[float], dict[str, torch.Tensor], list[float]]:
    """Losses, final state and scales of plain PyTorch under autocast with a `GradScaler`."""
    model = copy.deepcopy(model)
    optimizer, scaler = adamw(model), torch.amp.GradScaler("cpu")
    losses, scales = [], []
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = scaled_loss(model, batch)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        scaler.step(optimizer)
        scaler.update()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
    return losses, model.state_dict(), scales


FP16: dict[str, tuple[list[int], weft.Strategy]] = {
    "one rank": ([0], weft.Strategy()),
    "sharded": ([0, 1], replace(DATA, zero=weft.Zero(3))),
    "two stages": ([0, 1], replace(DATA, stages=2)),
}


@pytest.mark.parametrize("case", FP16)
def test_fp16_is_autocast_with_a_grad_scaler(case: str) -> None:
    """The second step overflows: it changes nothing but the scale, on every rank."""
    grid, strategy = FP16[case]
    torch.manual_seed(0)
    model, batches = GPT(), batches_of(token_batch, 4)
    for batch, factor in zip(batches, (1.0, 1e5, 1.0, 1.0), strict=True):
        batch["factor"] = torch.full((8,), factor)
    losses, state, scales = grad_scaler_training(model, batches, 0.3)
    assert scales == [65536.0, 32768.0, 32768.0, 32768.0]
    strategy = replace(strategy, precision="fp16", clip_norm=0.3)
    with compiled(model, scaled_loss, batches[0], grid, strategy) as program:
        assert [program.step(batch).item() for batch in batches] == pytest.approx(losses, rel=1e-4)
        assert difference(program.full_state_dict(), state) < 5e-3
        halved = {node.key for node in program.graph.of_kind(Input) if node.role == "state"}
        assert {"grad_scaler.scale", "grad_scaler.growth_tracker"} <= halved
