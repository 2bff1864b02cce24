"""Numbers of Python that change between steps, as schedules do: one plan serves all, and steps are those of PyTorch."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import weft
from beside_plain import Both, sgd, squares
from models import GPT, token_batch, token_loss
from single_device import assert_same_state, whole_state
from weft.errors import UserError
from weft.program.planning import variants

FACTOR = 1.0
Loss = Callable[[nn.Module, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    torch.manual_seed(0)
    with weft.local_world(2):
        yield


@pytest.fixture(autouse=True)
def two_plans(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first, and one in which the numbers are inputs."""
    monkeypatch.setattr(variants, "MOST", 2)


def trained(loss: Callable[[Any], Loss], values: Any = (1.0, 0.5, 0.25, 0.75, 2.0)) -> Both:
    held = SimpleNamespace(beta=values[0])
    both = Both(nn.Linear(8, 8), loss(held))
    for value in values:
        held.beta = value
        both.step()
    return both


def times(held: Any) -> Loss:
    return lambda model, x: squares(model, x) * held.beta


def counted(held: Any) -> Loss:
    return lambda model, x: squares(model, x) * (2 - held.beta / 4 + held.beta**2 % 3) - -held.beta


def on_the_left(held: Any) -> Loss:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        y = model(x)
        return (
            (held.beta + y - held.beta * y + (held.beta - y) / 3 + held.beta / (y + 9))
            .square()
            .mean()
        )

    return loss


def in_place(held: Any) -> Loss:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        y = model(x) * 1
        y *= held.beta
        y.add_(held.beta).div_(held.beta)
        return torch.mul(y, held.beta).square().mean()

    return loss


def in_a_function_of_torch(held: Any) -> Loss:
    return lambda model, x: F.mse_loss(model(x) / held.beta, x).sum()


def compared_with_tensors(held: Any) -> Loss:
    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        y = model(x)
        picked = torch.where(y > held.beta, y * held.beta, y)
        return (picked * (held.beta >= y) + y * y.lt(held.beta)).square().mean()

    return loss


@pytest.mark.parametrize(
    "loss", [times, compared_with_tensors, counted, on_the_left, in_place, in_a_function_of_torch]
)
def test_one_plan_serves_all_values(loss: Callable[[Any], Loss]) -> None:
    trained(loss)


@pytest.mark.parametrize(
    "values",
    [(1, 2, 3, 7, -1), (1.0, 0.0, -0.0, 1e-30, 3e38), tuple(np.linspace(1, 2, 5))],
    ids=["whole", "extreme", "numpy"],
)
def test_kinds_of_numbers(values: Any) -> None:
    trained(times, values)


def test_a_number_of_another_type_is_planned_anew() -> None:
    held = SimpleNamespace(beta=1)
    both = Both(nn.Linear(8, 8), times(held))
    held.beta = 2
    both.step()
    held.beta = 2.5
    with pytest.raises(UserError, match="the type of .*beta was 'int' and is 'float'"):
        both.program.step(torch.ones(8, 8))


def test_a_number_in_a_module_a_global_a_closure_and_a_list() -> None:
    global FACTOR
    inner, items = 1.0, [1.0, 1.0]

    class Scaled(nn.Linear):
        beta = 1.0

        def __init__(self) -> None:
            super().__init__(8, 8)
            self.own = 1.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * self.own + FACTOR

    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        return squares(model, x) * inner + model(x).mean() * items[1]

    both = Both(Scaled(), loss)
    for i in range(1, 6):
        FACTOR = 1.0 + i
        inner, items[1] = 1 / (1 + i), 0.1 * i
        both.change(lambda model, i=i: setattr(model, "own", 1.0 + i / 7))  # type: ignore[misc]
        both.step()


def test_a_branch_is_planned_anew_where_it_goes_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(variants, "MOST", 4)

    def warm(held: Any) -> Loss:
        def loss(model: nn.Module, x: torch.Tensor) -> Any:
            factor = min(1.0, held.beta / 4)
            return squares(model, x) * (factor if held.beta < 8 else 1.0)

        return loss

    both = trained(warm, [float(i) for i in range(10)])
    assert len(both.program._core.variants._all) == 4


@pytest.mark.parametrize(
    "read",
    [math.cos, round, int, str, hash, float, lambda x: {0.5: 1.0}.get(x, 2.0), lambda x: f"{x}"],
    ids=["cos", "round", "int", "str", "hash", "float", "key", "format"],
)
def test_what_reads_the_number_itself_is_planned_for_each(
    read: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "MOST", 8)

    def reading(held: Any) -> Loss:
        def loss(model: nn.Module, x: torch.Tensor) -> Any:
            found = read(held.beta)
            return squares(model, x) * (len(found) if isinstance(found, str) else found % 7)

        return loss

    trained(reading, (1.0, 0.5, 0.25, 0.5))


@pytest.mark.parametrize(
    "use",
    [
        lambda y, n: F.dropout(y, p=n, training=False),
        lambda y, n: torch.full_like(y, n) * y,
        lambda y, n: y * torch.tensor(n),
        lambda y, n: y.clamp(max=n),
        lambda y, n: torch.add(y, y, alpha=n),
        lambda y, n: y.lerp(y * 2, n),
        lambda y, n: y.new_full((8, 8), n) + y,
        lambda y, n: y * (1.0 if type(n) is float else 2.0),
        lambda y, n: y.double() * n + y.to(torch.bfloat16) * n,
    ],
    ids=["dropout", "full", "tensor", "clamp", "alpha", "lerp", "new", "type", "dtypes"],
)
def test_what_takes_numbers_only_is_planned_for_each(
    use: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(variants, "MOST", 8)

    def using(held: Any) -> Loss:
        return lambda model, x: use(model(x), held.beta).square().mean() * held.beta

    trained(using, (1.0, 0.5, 0.25, 0.5))


def test_the_number_is_returned_as_it_is_now() -> None:
    held = SimpleNamespace(beta=1.0)

    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        return {"loss": squares(model, x) * held.beta, "beta": held.beta, "half": held.beta / 2}

    model = nn.Linear(8, 8)
    ranks = weft.placement("cpu", [0, 1])
    program = weft.compile(model, loss, sgd(model), torch.ones(8, 8), placement=ranks)
    for value in (1.0, 2.0, 3.0, 4.0):
        held.beta = value
        found = program.step(torch.ones(8, 8))
        assert (found["beta"], found["half"]) == (value, value / 2)
        assert type(found["beta"]) is float
    program.verify(torch.ones(8, 8))


def test_an_evaluation_follows_them() -> None:
    held = SimpleNamespace(beta=1.0)
    model, x = nn.Linear(8, 8), torch.ones(8, 8)
    ranks = weft.placement("cpu", [0, 1])
    program = weft.compile(model, squares, sgd(model), x, placement=ranks)
    check = program.evaluation(lambda model, x: model(x).sum() * held.beta, x)
    plain = check.step(x)
    for value in (2.0, 3.0, 4.0):
        held.beta = value
        torch.testing.assert_close(check.step(x), plain * value)


def test_nothing_stands_for_the_number_afterwards() -> None:
    held, log = SimpleNamespace(beta=1.0), []

    def loss(model: nn.Module, x: torch.Tensor) -> Any:
        model.last = held.beta * 2
        log.append(held.beta)
        return squares(model, x) * held.beta

    both = Both(nn.Linear(8, 8), loss)
    for value in (1.0, 2.0, 3.0):
        held.beta = value
        both.step()
    assert {type(each) for each in [held.beta, *log]} == {float}
    assert not hasattr(both.model, "last") or type(both.model.last) is float


@pytest.mark.parametrize(
    "strategy",
    [
        weft.data_parallel(),
        weft.Strategy(batch={"*": weft.split(0)}, zero=weft.Zero(3), micro_batches=2),
        weft.Strategy(batch={"*": weft.split(0)}, stages=2, micro_batches=2),
        weft.tensor_parallel(["blocks.*.up"], ["blocks.*.down"]),
    ],
    ids=["data", "zero 3", "stages", "tensor"],
)
def test_strategies(strategy: weft.Strategy) -> None:
    held = SimpleNamespace(beta=1.0)

    def loss(model: nn.Module, batch: Any) -> Any:
        return token_loss(model, batch) / held.beta + held.beta * model.norm.weight.square().sum()

    torch.manual_seed(0)
    model, batch = GPT(layers=2), token_batch(4)
    plain = GPT(layers=2)
    plain.load_state_dict(model.state_dict())
    optimizer, other = sgd(model), sgd(plain)
    ranks = weft.placement("cpu", [0, 1])
    program = weft.compile(model, loss, optimizer, batch, placement=ranks, strategy=strategy)
    for step in range(5):
        held.beta = 1.0 + step / 3
        other.zero_grad()
        loss(plain, batch).backward()
        other.step()
        program.step(batch)
    assert_same_state(whole_state(model), plain.state_dict(), 1e-5)
