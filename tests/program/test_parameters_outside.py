"""The model's tensors as the user's code knows them outside of the model: by identity, attributes, class, optimizer."""

from __future__ import annotations

import functools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from beside_plain import squares
from weft.errors import CaptureError

Loss = Callable[[nn.Module, torch.Tensor], Any]
Case = Callable[[nn.Module, torch.optim.Optimizer], tuple[Loss, Callable[[int], None]]]


def nothing(step: int) -> None:
    """Change nothing between steps."""


def decayed(model: nn.Module, x: torch.Tensor, chosen: Callable[[Any], Any]) -> Any:
    return squares(model, x) + sum(chosen(p) * p.square().sum() for p in model.parameters())


def by_identity(model: nn.Module, _: Any) -> Any:
    bias = model.bias
    return lambda m, x: decayed(m, x, lambda p: 0.0 if p is bias else 0.3), nothing


def by_set_and_dict(model: nn.Module, _: Any) -> Any:
    some, factors = {model.bias}, {model.weight: 0.5, model.bias: 0.1}
    return lambda m, x: decayed(m, x, lambda p: factors[p] + (p in some)), nothing


def by_id(model: nn.Module, _: Any) -> Any:
    ids = {id(model.weight)}
    return lambda m, x: decayed(m, x, lambda p: float(id(p) in ids)), nothing


def by_groups(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def loss(m: nn.Module, x: torch.Tensor) -> Any:
        known = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return decayed(m, x, lambda p: 0.2 if id(p) in known else 5.0)

    return loss, nothing


def by_class(model: nn.Module, _: Any) -> Any:
    return lambda m, x: decayed(
        m, x, lambda p: 0.2 if isinstance(p, nn.Parameter) else 7.0
    ), nothing


def by_attribute(model: nn.Module, _: Any) -> Any:
    model.weight.decay = 0.4

    def change(step: int) -> None:
        model.weight.decay = 0.4 + step
        if step == 2:
            model.bias.decay = 0.1

    return lambda m, x: decayed(m, x, lambda p: getattr(p, "decay", 0.0)), change


def by_rate(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    def change(step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.01 / (step + 1)

    held = SimpleNamespace(optimizer=optimizer)
    return lambda m, x: decayed(m, x, lambda p: held.optimizer.param_groups[0]["lr"]), change


def by_scheduler(model: nn.Module, optimizer: torch.optim.Optimizer) -> Any:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)

    def change(step: int) -> None:
        scheduler.step()

    return lambda m, x: decayed(m, x, lambda p: scheduler.get_last_lr()[0]), change


def by_keyword(model: nn.Module, _: Any) -> Any:
    def loss(m: nn.Module, x: torch.Tensor, beta: float) -> Any:
        return squares(m, x) * beta

    given = functools.partial(loss, beta=1.0)
    return given, lambda step: given.keywords.update(beta=1.0 + step)


def by_defaults(model: nn.Module, _: Any) -> Any:
    def loss(m: nn.Module, x: torch.Tensor, beta: float = 1.0, *, other: float = 1.0) -> Any:
        return squares(m, x) * beta * other

    def change(step: int) -> None:
        loss.__defaults__ = (1.0 + step,)
        assert loss.__kwdefaults__
        loss.__kwdefaults__["other"] = 2.0 + step

    return loss, change


def by_default_item(model: nn.Module, _: Any) -> Any:
    held: defaultdict[str, float] = defaultdict(lambda: 1.0)
    return lambda m, x: squares(m, x) * held["kl"], lambda step: held.update(kl=2.0 + step)


def by_sign_of_zero(model: nn.Module, _: Any) -> Any:
    held = SimpleNamespace(beta=0.0)

    def change(step: int) -> None:
        held.beta = (-0.0, 0.0, -0.0, 1.0)[step]

    return lambda m, x: squares(m, x) * math.copysign(2, held.beta), change


def by_error(model: nn.Module, _: Any) -> Any:
    held = SimpleNamespace(beta=1.0)

    def loss(m: nn.Module, x: torch.Tensor) -> Any:
        try:
            factor = 1 / held.beta
        except ZeroDivisionError:
            factor = 9.0
        return squares(m, x) * factor

    def change(step: int) -> None:
        held.beta = (2.0, 3.0, 0.0, 1.0)[step]

    return loss, change


def by_two_sets(model: nn.Module, _: Any) -> Any:
    some, others = {model.weight}, {model.bias}

    def change(step: int) -> None:
        if step == 1:
            some.discard(model.weight)
            others.add(model.weight)

    return lambda m, x: decayed(m, x, lambda p: 0.3 * (p in some) + 0.2 * (p in others)), change


class WithAttributes(dict[str, Any]):
    __getattr__ = dict.__getitem__


def by_dict_with_attributes(model: nn.Module, _: Any) -> Any:
    held: Any = WithAttributes(beta=1.0)
    return lambda m, x: squares(m, x) * held.beta, lambda step: held.update(beta=2.0 + step)


CASES: tuple[Case, ...] = (
    *(by_identity, by_set_and_dict, by_id, by_groups, by_class, by_attribute, by_rate),
    *(by_scheduler, by_keyword, by_defaults, by_default_item, by_sign_of_zero, by_error),
    *(by_dict_with_attributes, by_two_sets),
)


def losses(case: Case, ranks: int, with_weft: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loss, change = case(model, optimizer)
    batch = torch.linspace(-1, 1, 64).reshape(8, 8)
    found = []
    if with_weft:
        grid = weft.placement("cpu", list(range(ranks)))
        with weft.local_world(ranks):
            program = weft.compile(model, loss, optimizer, batch, placement=grid)
            for step in range(4):
                found.append(program.step(batch).item())
                change(step)
            program.close()
        return found
    for step in range(4):
        value = loss(model, batch)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(value.item())
        change(step)
    return found


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_losses_are_those_of_plain_pytorch(case: Case, ranks: int) -> None:
    assert losses(case, ranks, True) == pytest.approx(losses(case, ranks, False), rel=1e-5)


@pytest.fixture
def world() -> Iterator[None]:
    with weft.local_world(2):
        yield


def compiled(model: nn.Module, loss: Loss) -> weft.Program:
    ranks = weft.placement("cpu", [0, 1])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    return weft.compile(model, loss, optimizer, torch.ones(8, 8), placement=ranks)


@pytest.mark.usefixtures("world")
def test_a_tensor_that_the_step_replaces_after_reading_it_is_refused() -> None:
    held = SimpleNamespace(t=torch.ones(8))
    model = nn.Linear(8, 8)
    model.t = torch.ones(8)

    def loss(m: nn.Module, x: torch.Tensor) -> Any:
        m.t = m.t + 1
        return squares(m, x * m.t)

    with pytest.raises(CaptureError, match="replaces it for the next step"):
        compiled(model, loss)
    assert torch.equal(model.t, torch.ones(8))
    assert torch.equal(held.t, torch.ones(8))


@pytest.mark.usefixtures("world")
def test_an_attribute_that_the_step_sets_on_a_parameter_is_refused() -> None:
    def loss(m: nn.Module, x: torch.Tensor) -> Any:
        m.weight.seen = True
        return squares(m, x)

    model = nn.Linear(8, 8)
    with pytest.raises(CaptureError, match="sets the attribute seen of weight"):
        compiled(model, loss)
    assert not hasattr(model.weight, "seen")
    assert "id" not in globals()
