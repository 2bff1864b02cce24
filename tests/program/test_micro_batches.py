"""Training in micro-batches gives what plain PyTorch gives on the whole batch, whatever the strategy."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from compiler import micro_models as micro
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
from weft.compiler.context import Context
from weft.errors import StrategyError

pytestmark = pytest.mark.usefixtures("double_precision")

STEPS = 3
S, B = weft.split, weft.broadcast


def gpt(dropout: float = 0.0, tied: bool = False) -> nn.Module:
    return GPT(layers=1, dropout=dropout, tied=tied)


ONE, PAIR, LINE, GRID = [0], [0, 1], [0, 1, 2, 3], [[0, 1], [2, 3]]
DATA = weft.data_parallel()
TENSOR = weft.tensor_parallel(GPT_COLUMNS, GPT_ROWS)
HYBRID = weft.hybrid_parallel(GPT_COLUMNS, GPT_ROWS)
SHARDED = weft.Strategy(batch={"*": S(0)}, parameters={"*.weight": S(0)})
SPLIT_HEAD = weft.Strategy(batch={"*": S(0)}, parameters={"head.weight": S(0), "head.bias": S(0)})

Loss = Callable[[nn.Module, Any], Any]


def train(
    model: nn.Module,
    loss_fn: Loss,
    batches: list[Any],
    grid: Any,
    strategy: weft.Strategy,
    parts: int,
) -> tuple[list[Any], dict[str, torch.Tensor]]:
    """What the steps of a program return, and its state at the end; `model` stays as it is."""
    model = copy.deepcopy(model)
    with weft.local_world(torch.tensor(grid).numel()):
        program = weft.compile(
            model,
            loss_fn,
            adamw(model),
            batches[0],
            placement=weft.placement("cpu", grid),
            strategy=replace(strategy, micro_batches=parts),
            seed=5,
        )
        found = [program.step(batch) for batch in batches]
        state = program.full_state_dict()
        program.close()
    return found, state


CASES: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[..., Any], Any, Any, int, int]] = {
    # name: model, loss, batch, ranks, strategy, samples, micro-batches
    "mlp": (MLP, classification_loss, vector_batch, ONE, DATA, 8, 4),
    "mlp, data": (MLP, classification_loss, vector_batch, PAIR, DATA, 8, 2),
    "mlp, data, uneven": (MLP, classification_loss, vector_batch, LINE, DATA, 12, 2),
    "mlp, fewer samples than ranks": (MLP, classification_loss, vector_batch, LINE, DATA, 4, 2),
    "mlp, split classes": (MLP, classification_loss, vector_batch, PAIR, SPLIT_HEAD, 8, 2),
    "gpt": (gpt, token_loss, token_batch, ONE, DATA, 4, 4),
    "gpt, data": (gpt, token_loss, token_batch, PAIR, DATA, 8, 4),
    "gpt, tensor": (gpt, token_loss, token_batch, PAIR, TENSOR, 4, 2),
    "gpt, hybrid": (gpt, token_loss, token_batch, GRID, HYBRID, 4, 2),
    "gpt, sharded parameters": (gpt, token_loss, token_batch, PAIR, SHARDED, 4, 2),
    "tied gpt, hybrid": (lambda: gpt(tied=True), token_loss, token_batch, GRID, HYBRID, 4, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_equals_the_whole_batch(case: str) -> None:
    make_model, loss_fn, make_batch, grid, strategy, samples, parts = CASES[case]
    torch.manual_seed(0)
    model = make_model()
    batches = [make_batch(samples, seed=seed) for seed in range(STEPS)]
    losses, state = plain_training(model, loss_fn, batches)
    found, own = train(model, loss_fn, batches, grid, strategy, parts)
    assert [loss.item() for loss in found] == pytest.approx(losses, rel=1e-10)
    assert_same_state(own, state)


@pytest.mark.parametrize("name", ["gpt, data", "gpt, hybrid"])
def test_gradients_are_reduced_within_the_last_micro_batch(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket for each gradient: the loop is cut behind each of them, and gives the same."""
    monkeypatch.setattr(Context, "bucket_bytes", 1)
    test_equals_the_whole_batch(name)


def test_ranks_without_elements_accumulate_as_well() -> None:
    """Two experts' gate on three ranks."""
    torch.manual_seed(0)
    model, batches = micro.Gated(), [vector_batch(8)] * STEPS
    strategy = weft.Strategy(batch={"*": B}, parameters={"*weight": S(0)})
    losses, state = plain_training(model, micro.own_loss, batches)
    found, own = train(model, micro.own_loss, batches, [0, 1, 2], strategy, 2)
    assert [loss.item() for loss in found] == pytest.approx(losses, rel=1e-10)
    assert_same_state(own, state)


LOOKS: dict[str, tuple[Callable[[], nn.Module], Loss, Callable[[], Any]]] = {
    "ignored labels": (MLP, micro.ignoring, micro.labels_with_holes),
    "weighted classes": (micro.Weighted, micro.own_loss, vector_batch),
    "a count of the model's": (MLP, micro.confident, vector_batch),
    "contrastive": (MLP, micro.contrastive, vector_batch),
    "the hardest samples": (MLP, micro.hardest, vector_batch),
    "the size of the batch": (MLP, micro.by_size, vector_batch),
    "a penalty": (MLP, micro.penalized, vector_batch),
    "gated experts": (micro.Gated, micro.own_loss, vector_batch),
    "lstm": (micro.Recurrent, classification_loss, micro.sequences),
}


@pytest.mark.parametrize("look", LOOKS)
def test_losses_that_look_at_the_batch(look: str) -> None:
    make_model, loss_fn, make_batch = LOOKS[look]
    torch.manual_seed(0)
    model, batches = make_model(), [make_batch()] * STEPS
    losses, state = plain_training(model, loss_fn, batches)
    found, own = train(model, loss_fn, batches, PAIR, DATA, 2)
    assert [loss.item() for loss in found] == pytest.approx(losses, rel=1e-10)
    assert_same_state(own, state)


@pytest.mark.parametrize("grid", [ONE, PAIR], ids=["1 rank", "2 ranks"])
def test_random_masks_are_those_of_the_whole_batch(grid: Any) -> None:
    torch.manual_seed(0)
    model = gpt(dropout=0.2)
    batches = [token_batch(4, seed=seed) for seed in range(STEPS)]
    whole, state = train(model, token_loss, batches, ONE, DATA, 1)
    found, own = train(model, token_loss, batches, grid, DATA, 2)
    assert [x.item() for x in found] == pytest.approx([x.item() for x in whole], rel=1e-10)
    assert_same_state(own, state)


def accumulating(
    model: nn.Module, loss_fn: Loss, batches: list[Any], parts: int
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Plain PyTorch, with gradients accumulated over micro-batches."""
    model = copy.deepcopy(model)
    optimizer = adamw(model)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = 0.0
        for part in range(parts):
            own = {key: x.chunk(parts)[part] for key, x in batch.items()}
            weighted = loss_fn(model, own) / parts
            weighted.backward()
            loss += weighted.item()
        optimizer.step()
        losses.append(loss)
    return losses, model.state_dict()


@pytest.mark.parametrize(
    ("grid", "strategy"),
    [
        (ONE, DATA),
        (PAIR, DATA),
        (PAIR, weft.Strategy(batch={"*": B}, parameters={"blocks.*.conv?.weight": S(0)})),
    ],
    ids=["1 rank", "data", "channels"],
)
def test_batch_norm_is_that_of_accumulated_gradients(grid: Any, strategy: Any) -> None:
    torch.manual_seed(0)
    model = ResNet()
    batches = [image_batch(8, seed=seed) for seed in range(STEPS)]
    losses, state = accumulating(model, classification_loss, batches, 2)
    found, own = train(model, classification_loss, batches, grid, strategy, 2)
    assert [loss.item() for loss in found] == pytest.approx(losses, rel=1e-10)
    assert_same_state(own, state)


def test_outputs_of_each_sample_are_whole() -> None:
    torch.manual_seed(0)
    model, batch = MLP(), vector_batch(8)
    (found,), _ = train(model, micro.smoothed, [batch], PAIR, DATA, 4)
    expected = micro.smoothed(model, batch)
    for key, value in expected.items():
        torch.testing.assert_close(found[key], value, rtol=1e-10, atol=1e-12)


def test_a_batch_of_global_tensors() -> None:
    torch.manual_seed(0)
    model, batch = MLP(), vector_batch(8)
    with weft.local_world(2):
        placement = weft.placement("cpu", PAIR)
        program = weft.compile(
            model,
            classification_loss,
            adamw(model),
            batch,
            placement=placement,
            strategy=replace(DATA, micro_batches=2),
        )
        expected = classification_loss(copy.deepcopy(model), batch).item()
        given = {key: weft.tensor(x, placement=placement, sbp=S(0)) for key, x in batch.items()}
        assert program.step(given).item() == pytest.approx(expected, rel=1e-10)
        program.close()


def test_explain_tells_of_micro_batches() -> None:
    model, batch = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4)), vector_batch(8)
    with weft.local_world(2):
        program = weft.compile(
            model,
            micro.contrastive,
            adamw(model),
            batch,
            placement=weft.placement("cpu", PAIR),
            strategy=replace(DATA, micro_batches=2),
        )
        text = " ".join(program.explain(details=True).split())
        program.close()
    assert "2 micro-batches of 4 samples (x)" in text
    assert "BatchNorm sees micro-batches in 1: statistics of each" in text
    assert "all micro-batches wait for one another in weft.pack at" in text


def test_explain_counts_what_each_micro_batch_sends() -> None:
    """Activations are reduced in parts: in all as many bytes as at once."""
    batch, totals = token_batch(4), []
    with weft.local_world(2):
        for parts in (1, 2):
            model = gpt()
            program = weft.compile(
                model,
                token_loss,
                adamw(model),
                batch,
                placement=weft.placement("cpu", PAIR),
                strategy=replace(TENSOR, micro_batches=parts),
            )
            totals.append(
                re.findall(r"boxings, ([\d.]+ \w+) a step", program.explain(details=True))
            )
            program.close()
    assert totals[0] == totals[1]
    assert len(totals[0]) == 1


def test_a_batch_that_cannot_be_cut() -> None:
    model, batch = MLP(), vector_batch(6)
    with (
        weft.local_world(1),
        pytest.raises(
            StrategyError, match=r"6 samples cannot be divided .* leaf 'x' has shape \[6, 8\]"
        ),
    ):
        weft.compile(
            model,
            classification_loss,
            adamw(model),
            batch,
            placement=weft.placement("cpu", ONE),
            strategy=replace(DATA, micro_batches=4),
        )
