"""Recompute: the same steps with less kept in between, dropout masks included."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import weft
from models import GPT, ResNet, classification_loss, image_batch, token_batch, token_loss
from single_device import assert_same_state, assert_same_training, compiled, plain_training

pytestmark = pytest.mark.usefixtures("double_precision")

S, B = weft.split, weft.broadcast
DATA = weft.data_parallel()
HYBRID = weft.hybrid_parallel(("blocks.*.qkv", "blocks.*.up"), ("blocks.*.proj", "blocks.*.down"))
CASES: dict[str, tuple[Any, Any, Any, Any, weft.Strategy]] = {
    "gpt, hybrid, parameters sharded": (
        GPT,
        token_loss,
        token_batch,
        [[0, 1], [2, 3]],
        replace(HYBRID, zero=weft.Zero(3)),
    ),
    "tied gpt, two stages": (
        lambda: GPT(tied=True),
        token_loss,
        token_batch,
        [0, 1, 2, 3],
        replace(DATA, stages=2),
    ),
    "resnet": (ResNet, classification_loss, image_batch, [0, 1], DATA),
}


@pytest.mark.parametrize("case", CASES)
def test_recomputed_steps(case: str) -> None:
    make_model, loss_fn, make_batch, grid, strategy = CASES[case]
    torch.manual_seed(0)
    model = make_model()
    batches = [make_batch(4, seed=seed) for seed in range(3)]
    expected = plain_training(model, loss_fn, batches)
    strategy = replace(strategy, recompute=["blocks.*"])
    with compiled(model, loss_fn, batches[0], grid, strategy) as program:
        assert ".again" in str(program.graph)
        assert_same_training(program, batches, expected)


def test_same_masks_again() -> None:
    torch.manual_seed(0)
    model, batches = GPT(dropout=0.3), [token_batch(4, seed=seed) for seed in range(2)]
    with compiled(model, token_loss, batches[0], [0], weft.Strategy(), seed=3) as program:
        expected = [program.step(batch).item() for batch in batches]
        state = program.full_state_dict()
    strategy = replace(DATA, recompute=["blocks.*"])
    with compiled(model, token_loss, batches[0], [0, 1], strategy, seed=3) as program:
        assert [program.step(batch).item() for batch in batches] == pytest.approx(expected)
        assert_same_state(program.full_state_dict(), state)


def test_memory() -> None:
    """Only one of four blocks has its inner tensors at a time; the plan says what is measured."""
    torch.manual_seed(0)
    model = GPT(width=32, layers=4, context=32)
    batch = token_batch(16, time=32)
    peaks = {}
    for patterns in ((), ("blocks.*.attention",), ("aten.gelu.default",), ("blocks.*",)):
        strategy = weft.Strategy(recompute=patterns)
        with compiled(model, token_loss, batch, [0], strategy) as program:
            program.step(batch)
            memory = program.memory()[0]
            assert memory.measured is not None
            peaks[patterns] = memory.measured.activations
            # Values of which the plan does not know whether they are copies count as such.
            assert 1.0 <= memory.predicted.activations / peaks[patterns] <= 1.15
    assert peaks["aten.gelu.default",] < 0.9 * peaks[()]
    assert peaks["blocks.*.attention",] < 0.85 * peaks[()]
    assert peaks["blocks.*",] < 0.45 * peaks[()]
