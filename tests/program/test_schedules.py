"""A pipeline trains as on one device under every schedule, and its plans are what the schedule says."""

from __future__ import annotations

import copy
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
    classification_loss,
    token_batch,
    token_loss,
    vector_batch,
)
from single_device import adamw
from weft.compiler.schedule.presets import PRESETS
from weft.errors import StrategyError
from weft.ir.plan import Compute, RankPlan
from weft.strategy.parts import SCHEDULES

pytestmark = pytest.mark.usefixtures("double_precision")


def compiled(model: nn.Module, loss: Any, data: Any, ranks: int, **fields: Any) -> weft.Program:
    fields.setdefault("batch", {"*": weft.split(0)})
    return weft.compile(
        model,
        loss,
        adamw(model),
        data,
        placement=weft.placement("cpu", list(range(ranks))),
        strategy=weft.Strategy(**fields),
    )


def check(model: nn.Module, loss: Any, data: Any, ranks: int, **fields: Any) -> weft.Program:
    """Three steps of a program and of plain PyTorch."""
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    with weft.local_world(ranks, timeout=30):
        program = compiled(model, loss, data, ranks, **fields)
        for _ in range(3):
            optimizer.zero_grad()
            expected = loss(plain, data)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(program.step(data), expected.detach(), rtol=0, atol=1e-10)
    return program


def segments(plan: RankPlan, kind: str) -> list[Compute]:
    return [
        actor
        for actor in plan.actors
        if isinstance(actor, Compute) and actor.acts > 1 and actor.phase.kind == kind
    ]


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
def test_every_schedule_trains_as_one_device(schedule: Any) -> None:
    torch.manual_seed(0)
    row = PRESETS.get(schedule)
    stages = 4 if row and row.takes_turns else 2
    program = check(
        GPT(layers=2), token_loss, token_batch(n=8), 2,
        stages=stages, micro_batches=4, schedule=schedule,
    )  # fmt: skip
    for plan in program.plan.ranks:
        # One forward actor for each stage that a rank runs.
        assert len(segments(plan, "forward")) == stages // 2
        assert bool(segments(plan, "weight")) == (row is None or row.splits_weights)
        assert all(each.credits <= 4 for each in plan.registers)
    # Forward and backward do not wait for each other.
    assert {(0, 1), (1, 0)} <= {group.ranks for group in program.plan.communicators}
    text = program.explain(details=True)
    assert f"schedule: {schedule or 'computed'}, 4 micro-batches" in text


def test_tensor_parallel_stages() -> None:
    torch.manual_seed(0)
    tensor = weft.tensor_parallel(GPT_COLUMNS, GPT_ROWS)
    check(
        GPT(layers=1), token_loss, token_batch(n=4), 4,
        batch=tensor.batch, parameters=tensor.parameters, stages=2, micro_batches=2,
        schedule="zero_bubble",
    )  # fmt: skip


@pytest.mark.one_process("it reads the plans of all ranks")
def test_gathers_of_zero_3_are_prefetched_in_every_stage() -> None:
    torch.manual_seed(0)
    program = check(
        GPT(layers=1), token_loss, token_batch(n=8), 4,
        stages=2, micro_batches=2, schedule="1f1b", zero=weft.Zero(level=3),
    )  # fmt: skip
    kinds = {each.kind for plan in program.plan.ranks for each in plan.registers}
    assert "control" in kinds


def test_ranks_of_one_program_plan_alike() -> None:
    """Every process plans all ranks; what it gets for one does not depend on which it asks for."""
    with weft.local_world(2):
        first, second = (
            compiled(GPT(layers=1), token_loss, token_batch(n=4), 2, stages=2, micro_batches=2)
            for _ in range(2)
        )
        assert str(first.plan) == str(second.plan)


@pytest.mark.one_process("it reads the plans of both ranks")
def test_a_memory_limit_takes_copies_away() -> None:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"stages": 2, "micro_batches": 4}
    with weft.local_world(2):
        model, batch = GPT(layers=2), token_batch(n=8)
        free = compiled(model, token_loss, batch, 2, **fields)
        peak = max(each.predicted.peak for each in free.memory().ranks)
        tight = compiled(model, token_loss, batch, 2, **fields, memory_limit=peak - 1)
        assert max(each.predicted.peak for each in tight.memory().ranks) < peak
        with pytest.raises(StrategyError, match="memory_limit"):
            compiled(model, token_loss, batch, 2, **fields, memory_limit=peak // 4)


def test_interleaved_wants_several_stages_on_a_rank() -> None:
    with weft.local_world(2), pytest.raises(StrategyError, match="several stages on each rank"):
        compiled(
            MLP(), classification_loss, vector_batch(n=8), 2,
            stages=2, micro_batches=2, schedule="interleaved",
        )  # fmt: skip
