"""Steps without an update: gradients add up over steps, as over several calls of backward in plain PyTorch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import weft
from models import GPT, MLP, classification_loss, token_batch, token_loss, vector_batch
from single_device import adamw, compiled
from weft.errors import UserError

S = weft.split
STRATEGIES: dict[str, tuple[Any, weft.Strategy]] = {
    "data": ([0, 1], weft.data_parallel()),
    "sharded": ([0, 1], weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(3), micro_batches=2)),
    "pipeline": ([[0, 1], [2, 3]], weft.Strategy(batch={"*": S(0)}, stages=2, micro_batches=2)),
    "data, clipped": ([0, 1], weft.Strategy(batch={"*": S(0)}, clip_norm=0.1)),
    "pipeline, sharded, clipped": (
        [[0, 1], [2, 3]],
        weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(1), stages=2, clip_norm=0.1),
    ),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_gradients_add_up_over_steps(name: str) -> None:
    torch.manual_seed(0)
    model = GPT().double()
    expected = copy.deepcopy(model)
    optimizer = adamw(expected)
    batches = [token_batch(4, seed=seed) for seed in range(5)]
    updates = [False, False, True, False, True]
    with compiled(model, token_loss, batches[0], *STRATEGIES[name]) as program:
        for batch, update in zip(batches, updates, strict=True):
            loss = token_loss(expected, batch)
            loss.backward()
            if update:
                if (limit := STRATEGIES[name][1].clip_norm) is not None:
                    norm = nn.utils.clip_grad_norm_(expected.parameters(), limit)
                    assert norm > 2 * limit
                optimizer.step()
                optimizer.zero_grad()
            assert program.step(batch, update=update).item() == pytest.approx(
                loss.item(), rel=1e-10
            )
        state = program.full_state_dict()
    for key, value in expected.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(
    ("strategy", "message"),
    [
        (weft.Strategy(precision="fp16"), "an overflow would have to skip all steps"),
    ],
)
def test_what_cannot_be_added_up_is_refused(strategy: weft.Strategy, message: str) -> None:
    batch = vector_batch(8, dtype=torch.float32)
    with compiled(MLP(), classification_loss, batch, [0], strategy) as program:
        with pytest.raises(UserError, match=message):
            program.step(batch, update=False)
        program.step(batch)


def test_a_scaled_step_does_not_add_to_the_gradients_of_eager_losses() -> None:
    batch, model = vector_batch(8, dtype=torch.float32), MLP()
    where, strategy = weft.placement("cpu", [0]), weft.Strategy(precision="fp16")
    with weft.local_world(1):
        program = weft.compile(
            model, classification_loss, adamw(model), batch, placement=where, strategy=strategy
        )
        classification_loss(model, batch).backward()
        with pytest.raises(UserError, match=r"cannot add to.*call optimizer.zero_grad"):
            program.step(batch)
        model.zero_grad()
        program.step(batch)
        program.close()


def test_a_program_without_an_optimizer_keeps_no_gradients() -> None:
    batch = vector_batch(8, dtype=torch.float32)
    with weft.local_world(1):
        program = weft.compile(
            MLP(), classification_loss, None, batch, placement=weft.placement("cpu", [0])
        )
        with pytest.raises(UserError, match="has no optimizer"):
            program.step(batch, update=False)
        program.close()
