"""Numbers, flags and texts in a batch that later batches change: taken as they are then, as plain PyTorch does."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import weft
from single_device import assert_same_state
from weft.errors import BatchError, UserError

STAGES = weft.Strategy(stages=2, micro_batches=2)


def batch_of(seed: int, rows: int = 8, **constants: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(rows, 6, dtype=torch.float64, generator=generator), **constants}


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def compiled(model: nn.Module, loss_fn: Any, batch: Any, strategy: Any = None) -> weft.Program:
    place = weft.placement("cpu", [0, 1])
    return weft.compile(model, loss_fn, sgd(model), batch, placement=place, strategy=strategy)


def check(loss_fn: Any, batches: list[Any], plans: int, strategy: Any = None) -> None:
    """Losses and the final state are those of plain PyTorch, with so many plans."""
    model = two_layers()
    plain = copy.deepcopy(model)
    other = sgd(plain)
    with weft.local_world(2):
        program = compiled(model, loss_fn, batches[0], strategy)
        for batch in batches:
            other.zero_grad()
            loss = loss_fn(plain, batch)
            loss.backward()
            other.step()
            assert program.step(batch).item() == pytest.approx(loss.item(), rel=1e-12)
        assert_same_state(program.full_state_dict(), plain.state_dict(), 1e-12)
        assert len(program._variants._all) == plans
        program.close()


def tempered(model: nn.Module, batch: Any) -> Any:
    return (model(batch["x"]) / batch["temperature"]).square().mean() * (1 + batch["epoch"])


@pytest.mark.parametrize("strategy", [None, STAGES], ids=["data", "stages"])
def test_numbers_are_inputs_from_their_first_change_on(strategy: Any) -> None:
    batches = [batch_of(i, temperature=0.5 + i / 10, epoch=i) for i in range(4)]
    check(tempered, batches, 2, strategy)


def chosen(model: nn.Module, batch: Any) -> Any:
    made = model(batch["x"])
    loss = made.abs().mean() if batch["kind"] == "l1" else made.square().mean()
    return loss * 2 if batch["warm"] else loss


def test_texts_and_flags_are_planned_for() -> None:
    given: list[tuple[str | None, bool]] = [("l1", True), ("l2", True), ("l1", True), (None, False)]
    check(chosen, [batch_of(i, kind=kind, warm=warm) for i, (kind, warm) in enumerate(given)], 3)


def test_numbers_that_nothing_reads_cost_one_plan() -> None:
    batches = [batch_of(i, step=i) for i in range(4)]
    check(lambda model, batch: model(batch["x"]).square().mean(), batches, 2)


def test_other_shapes_take_the_number_of_their_batch() -> None:
    batches = [batch_of(i, 8 - i % 2 * 4, temperature=1.0 + i, epoch=1) for i in range(4)]
    check(tempered, batches, 3)


def test_they_come_back_and_an_evaluation_takes_its_own() -> None:
    def both(model: nn.Module, batch: Any) -> Any:
        return tempered(model, batch), batch["temperature"]

    def scaled(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]) * batch["temperature"]

    model = two_layers()
    plain = copy.deepcopy(model)
    batches = [batch_of(0, temperature=t, epoch=0) for t in (1.0, 2.0, 4.0)]
    with weft.local_world(2):
        program = compiled(model, both, batches[0])
        evaluation = program.evaluation(scaled, batches[0])
        for batch in batches:
            torch.testing.assert_close(evaluation.step(batch), scaled(plain, batch).detach())
        assert [program.step(batch, update=False)[1] for batch in batches] == [1.0, 2.0, 4.0]
        program.close()


def test_a_tensor_in_their_place_is_refused_and_too_many_plans_are() -> None:
    def hashed(model: nn.Module, batch: Any) -> Any:
        return model(batch["x"]).square().mean() * len(batch["name"])

    with weft.local_world(1):
        model = two_layers()
        program = weft.compile(
            model, hashed, sgd(model), batch_of(0, name=""), placement=weft.placement("cpu", [0])
        )
        with pytest.raises(BatchError, match=r"'name'.*the constant '', found a tensor"):
            program.step(batch_of(0, name=torch.ones(())))
        for number in range(16):
            program.step(batch_of(0, name="x" * number))
        with pytest.raises(UserError, match=r"the batch's leaf 'name' was .* 16 values"):
            program.step(batch_of(0, name="x" * 16))
        program.close()
