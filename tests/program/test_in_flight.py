"""Micro-batches in flight, given for each stage: what stages hold, and what is refused before anything runs."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import weft
from models import GPT, token_batch, token_loss
from single_device import adamw
from weft.compiler.schedule.schedule import in_flight
from weft.errors import StrategyError
from weft.strategy.parts import SCHEDULES

pytestmark = pytest.mark.usefixtures("double_precision")


def compiled(model: nn.Module, loss: Any, data: Any, ranks: int, **fields: Any) -> weft.Program:
    return weft.compile(
        model,
        loss,
        adamw(model),
        data,
        placement=weft.placement("cpu", list(range(ranks))),
        strategy=weft.Strategy(batch={"*": weft.split(0)}, **fields),
    )


GIVEN: tuple[tuple[int, tuple[int, ...]], ...] = (
    (2, (1, 1)),
    (2, (3, 1)),
    (2, (2, 4)),
    (4, (1, 1, 1, 1)),
    (4, (9, 2, 3, 1)),
)


@pytest.mark.parametrize("schedule", [None, *SCHEDULES])
@pytest.mark.parametrize(("stages", "given"), GIVEN)
def test_a_stage_holds_as_many_as_it_is_given(
    schedule: Any, stages: int, given: tuple[int, ...]
) -> None:
    """On two ranks, of which each has two stages in turn where there are four; steps are those of plain PyTorch."""
    if schedule == "interleaved" and stages == 2:
        return
    torch.manual_seed(0)
    model, data = GPT(layers=4), token_batch(n=8)
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    with weft.local_world(2, timeout=30):
        program = compiled(
            model, token_loss, data, 2,
            stages=stages, micro_batches=4, schedule=schedule, in_flight=given,
        )  # fmt: skip
        plans = {plan.rank: plan for plan in program.plan.ranks}
        for stage, most in enumerate(given):
            if stage % 2 in plans:
                assert in_flight(plans[stage % 2], stage) == min(most, 4)
        for _ in range(2):
            optimizer.zero_grad()
            expected = token_loss(plain, data)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(program.step(data), expected.detach(), rtol=0, atol=1e-10)
        said = ", ".join(map(str, given))
        assert f"in flight {said}" in " ".join(str(program.explain()).split())
        program.close()


def test_more_in_flight_takes_more_memory_and_less_time() -> None:
    torch.manual_seed(0)
    job = weft.Job(model := GPT(layers=4), token_loss, adamw(model), token_batch(n=32))
    stored, found = job.stored(), []
    for given in ((1, 1), (2, 1), (4, 4)):
        strategy = weft.Strategy(stages=2, micro_batches=8, schedule="gpipe", in_flight=given)
        simulation = weft.simulate(stored, strategy, "h100x2")
        assert simulation.memory is not None
        found.append((simulation.memory.planned, simulation.step_seconds))
    memory, seconds = zip(*found, strict=True)
    assert list(memory) == sorted(set(memory))
    assert seconds[0] > seconds[1]


@pytest.mark.parametrize(
    ("fields", "found"),
    [
        ({"stages": 2, "in_flight": (2, 1, 1)}, "gives 3, but there are 2 stages; give 2"),
        ({"stages": 2, "in_flight": (2,)}, "gives 1, but there are 2 stages; give 2"),
        ({"in_flight": (2,)}, "gives 1, but there is one stage"),
    ],
)
def test_another_number_of_stages_is_refused(fields: Any, found: str) -> None:
    model = GPT(layers=2)
    with weft.local_world(2), pytest.raises(StrategyError, match=found):
        compiled(model, token_loss, token_batch(n=8), 2, micro_batches=2, **fields)


def centred_loss(model: nn.Module, batch: Any) -> torch.Tensor:
    """A loss of all samples together: the backward of any waits for the forward of all."""
    logits = model(batch["x"])
    logits = logits - logits.mean(0, keepdim=True)
    return cross_entropy(logits.flatten(0, 1), batch["y"].flatten())


@pytest.mark.parametrize("schedule", [None, "1f1b"])
def test_fewer_than_a_loss_over_the_batch_needs_are_refused(schedule: Any) -> None:
    fields: dict[str, Any] = {"stages": 2, "micro_batches": 4, "schedule": schedule}
    with weft.local_world(2, timeout=30):
        model, data = GPT(layers=2), token_batch(n=8)
        found = r"in_flight=\(2, 4\) lets stage 0 hold 2 micro-batches, but it must hold all 4"
        with pytest.raises(StrategyError, match=found):
            compiled(model, centred_loss, data, 2, **fields, in_flight=(2, 4))
        program = compiled(model, centred_loss, data, 2, **fields, in_flight=(4, 4))
        program.step(data)
        program.close()
