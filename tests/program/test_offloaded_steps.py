"""Offload: the same steps while what chosen modules keep waits in host memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, token_batch, token_loss
from single_device import assert_same_training, compiled, plain_training

pytestmark = pytest.mark.usefixtures("double_precision")

S, B = weft.split, weft.broadcast
CASES: dict[str, tuple[Any, weft.Strategy]] = {
    "one rank": ([0], weft.Strategy(offload=["blocks.*"])),
    "beside recompute": ([0], weft.Strategy(offload=["blocks.0"], recompute=["blocks.1"])),
    "stages, micro-batches, parameters sharded": (
        [0, 1, 2, 3],
        weft.Strategy(
            batch={"*": S(0)},
            parameters={"*": B},
            stages=2,
            micro_batches=2,
            zero=weft.Zero(3),
            offload=["blocks.*"],
        ),
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_offloaded_steps(case: str) -> None:
    grid, strategy = CASES[case]
    torch.manual_seed(0)
    model = GPT(context=16)
    batches = [token_batch(4, time=16, seed=seed) for seed in range(3)]
    expected = plain_training(model, token_loss, batches)
    with compiled(model, token_loss, batches[0], grid, strategy) as program:
        assert "weft.load" in str(program.plan)
        assert_same_training(program, batches, expected)


class Sine(nn.Linear):
    """Its backward first takes a cosine, which reads no gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(super().forward(x))


def test_values_of_the_whole_batch_beside_micro_batches() -> None:
    """Where samples meet, layers run once a step; what they keep cannot wait for a gradient of a micro-batch."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), Sine(16, 16))
    batches = [{"x": torch.randn(8, 4, 16), "y": torch.randn(8, 4, 16)} for _ in range(3)]

    def loss_fn(model: nn.Module, batch: Any) -> torch.Tensor:
        x = model[0](batch["x"])
        x = x + torch.cat([torch.zeros_like(x[:1]), x[:-1]])
        return (model[1](x) - batch["y"]).abs().topk(1, -1).values.mean()

    expected = plain_training(model, loss_fn, batches)
    strategy = weft.Strategy(micro_batches=2, offload=["1"])
    with compiled(model, loss_fn, batches[0], [0], strategy) as program:
        assert "weft.load" in str(program.plan)
        assert_same_training(program, batches, expected)


def test_memory_of_the_device() -> None:
    torch.manual_seed(0)
    model, batch = GPT(width=32, layers=3, context=32), token_batch(16, time=32)
    peaks = {}
    for patterns in ((), ("blocks.*",)):
        with compiled(model, token_loss, batch, [0], weft.Strategy(offload=patterns)) as program:
            program.step(batch)
            memory = program.memory()[0]
            assert memory.measured is not None
            peaks[patterns] = memory.measured.activations
            # Values of which the plan does not know whether they are copies count as such.
            assert 1.0 <= memory.predicted.activations / peaks[patterns] <= 1.07
    assert peaks["blocks.*",] < 0.4 * peaks[()]


def test_casts_of_parameters_stay() -> None:
    """They are made once a step and read for each micro-batch: loads for the first would wait for the last."""
    batch, plain = token_batch(4, time=16), CASES["stages, micro-batches, parameters sharded"][1]
    found = []
    for patterns in ((), ("blocks.*",)):
        torch.manual_seed(0)
        model = GPT(context=16).float()
        strategy = replace(plain, precision="bf16", offload=patterns)
        with compiled(model, token_loss, batch, [0, 1, 2, 3], strategy) as program:
            assert ("weft.load" in str(program.plan)) == bool(patterns)
            found.append([float(program.step(batch)) for _ in range(2)])
    assert found[0] == found[1]
