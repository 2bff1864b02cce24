"""Other models in the loss function: in one program with the model, plain beside it, or live by another program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import weft
from weft.errors import CaptureError, UserError

BATCH = {
    "real": torch.linspace(-1, 1, 32).reshape(8, 4),
    "z": torch.linspace(-2, 1, 24).reshape(8, 3),
}


def networks() -> tuple[nn.ModuleDict, torch.optim.Optimizer, torch.optim.Optimizer]:
    torch.manual_seed(0)
    both = nn.ModuleDict({"make": nn.Linear(3, 4), "judge": nn.Linear(4, 1)})
    made, judged = (torch.optim.Adam(each.parameters(), 1e-2) for each in both.values())
    return both, made, judged


def judge_loss(both: Any, batch: dict[str, Tensor]) -> Tensor:
    made = both["make"](batch["z"]).detach()
    return F.softplus(-both["judge"](batch["real"])).mean() + F.softplus(both["judge"](made)).mean()


def make_loss(both: Any, batch: dict[str, Tensor]) -> Tensor:
    return F.softplus(-both["judge"](both["make"](batch["z"]))).mean()


def distance(model: nn.Module, batch: dict[str, Tensor], teacher: nn.Module) -> Tensor:
    return (model(batch["z"]) - teacher(batch["z"]).detach()).square().mean()


def compiled(model: nn.Module, loss_fn: Any, optimizer: Any) -> weft.Program:
    return weft.compile(model, loss_fn, optimizer, BATCH, placement=weft.placement("cpu", [0, 1]))


def test_two_networks_that_are_trained_against_each_other() -> None:
    both, made, judged = networks()
    expected = []
    for _ in range(3):
        for optimizer, loss_fn in ((judged, judge_loss), (made, make_loss)):
            both.zero_grad()
            loss = loss_fn(both, BATCH)
            loss.backward()
            optimizer.step()
            expected.append(loss.item())
    both, made, judged = networks()
    with weft.local_world(2):
        programs = compiled(both, judge_loss, judged), compiled(both, make_loss, made)
        losses = [program.step(BATCH).item() for _ in range(3) for program in programs]
    assert losses == pytest.approx(expected, rel=1e-5)


def test_a_plain_model_beside_the_trained_one_is_read_live() -> None:
    torch.manual_seed(0)
    model, teacher = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    before = distance(model, BATCH, teacher).item()
    start = teacher.weight.detach().clone()
    with weft.local_world(2):
        program = compiled(model, lambda m, batch: distance(m, batch, teacher), optimizer)
        assert program.step(BATCH).item() == pytest.approx(before)
        with torch.no_grad():
            teacher.weight.mul_(5)
        found = program.step(BATCH).item()
        program.close()
        weft.release(model)
    assert torch.equal(teacher.weight, start * 5)
    assert found == pytest.approx(distance(model, BATCH, teacher).item())
    assert found != pytest.approx(before, rel=0.1)


def test_it_is_not_taken_over_while_it_is_read() -> None:
    model, teacher = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    other = torch.optim.SGD(teacher.parameters(), 0.1)
    with weft.local_world(2):
        program = compiled(model, lambda m, batch: distance(m, batch, teacher), optimizer)
        with pytest.raises(UserError, match="an open program reads weight as a constant"):
            compiled(teacher, lambda m, batch: m(batch["z"]).square().mean(), other)
        assert type(teacher.weight) is nn.Parameter
        program.close()
        compiled(teacher, lambda m, batch: m(batch["z"]).square().mean(), other).step(BATCH)


def test_a_live_model_beside_the_trained_one_is_refused() -> None:
    model, teacher = nn.Linear(3, 1), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    other = torch.optim.SGD(teacher.parameters(), 0.1)
    with weft.local_world(2):
        compiled(teacher, lambda m, batch: m(batch["z"]).square().mean(), other)
        with pytest.raises(CaptureError, match="live tensor .* of another compiled model"):
            compiled(model, lambda m, batch: distance(m, batch, teacher), optimizer)
        assert type(model.weight) is nn.Parameter


def test_one_optimizer_of_two_models_is_refused() -> None:
    both, _, _ = networks()
    optimizer = torch.optim.Adam(both.parameters(), 1e-2)
    with weft.local_world(2), pytest.raises(CaptureError, match="is not a parameter of the model"):
        compiled(both["judge"], lambda m, batch: m(batch["real"]).mean(), optimizer)
    assert type(both["judge"].weight) is nn.Parameter
