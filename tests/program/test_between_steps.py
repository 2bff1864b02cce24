"""What is between two steps (gradients, optimizer states, addresses, cached results): compared, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from beside_plain import Both, compiled, squares
from weft.errors import CaptureError

Loss = Callable[[nn.Module, torch.Tensor], Any]


@pytest.fixture(autouse=True)
def two_ranks() -> Any:
    with weft.local_world(2):
        yield


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


# -------------------------------------------------------------------------- gradients and states


def of_gradients(model: nn.Module, batch: torch.Tensor) -> Any:
    found = (p.grad for p in model.parameters())
    return squares(model, batch) + sum(grad.sum() for grad in found if grad is not None)


def without_gradients(model: nn.Module, batch: torch.Tensor) -> Any:
    model.zero_grad()
    return squares(model, batch)


def setting_gradients(model: nn.Module, batch: torch.Tensor) -> Any:
    model.bias.grad = None  # type: ignore[assignment]
    return squares(model, batch)


@pytest.mark.parametrize(
    ("loss", "words"),
    [
        (of_gradients, "reads the gradient of weight"),
        (without_gradients, "reads the gradient of weight"),
        (setting_gradients, "sets the gradient of bias"),
    ],
)
def test_gradients_that_a_step_reads_are_refused(loss: Loss, words: str) -> None:
    model = linear()
    with pytest.raises(
        CaptureError, match=rf"(?s)test_between_steps\.py.*{words}.*zero_grad outside"
    ):
        compiled(model, loss)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_gradients_of_a_tensor_from_outside_are_refused() -> None:
    other = nn.Parameter(torch.ones(8))
    with pytest.raises(CaptureError, match="reads the gradient of a tensor from outside"):
        compiled(linear(), lambda m, x: squares(m, x) * (1.0 if other.grad is None else 2.0))


def test_a_gradient_that_a_hook_reads_is_refused() -> None:
    model = linear()

    def loss(m: nn.Module, x: torch.Tensor) -> Any:
        out = m(x)
        out.register_hook(lambda grad: grad if m.bias.grad is None else 2 * grad)  # type: ignore[union-attr]
        return out.square().mean()

    with pytest.raises(CaptureError, match="reads the gradient of bias"):
        compiled(model, loss)


def test_gradients_of_what_a_step_makes_are_its_own() -> None:
    def loss(m: nn.Module, x: torch.Tensor) -> Any:
        own = x.detach().requires_grad_()
        return squares(m, own) * (1.0 if own.grad is None else 2.0)

    Both(linear(), loss).step()


def state_there(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    return lambda m, x: squares(m, x) * (2.0 if m.weight in optimizer.state else 1.0)


def state_of_all(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    held = SimpleNamespace(one=optimizer)
    return lambda m, x: squares(m, x) * (1.0 + len(held.one.state_dict()["state"]))


def state_held(model: nn.Module, optimizer: torch.optim.Optimizer) -> Loss:
    optimizer.state[model.weight]["momentum_buffer"] = torch.ones(8, 8)
    state = optimizer.state[model.weight]
    return lambda m, x: squares(m, x) + state["momentum_buffer"].sum()


@pytest.mark.parametrize("make", [state_there, state_of_all, state_held])
def test_states_that_a_step_reads_are_refused(make: Callable[..., Loss]) -> None:
    model = linear()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loss = make(model, optimizer)
    ranks = weft.placement("cpu", [0, 1])
    with pytest.raises(CaptureError, match="reads the state of an optimizer.*between steps"):
        weft.compile(model, loss, optimizer, torch.ones(8, 8), placement=ranks)
    assert len(optimizer.state) in (0, 1), "states are read as before again"


def test_addresses_are_refused() -> None:
    model = linear()
    factors = {p.data_ptr(): 2.0 for p in model.parameters()}
    with pytest.raises(CaptureError, match=r"the address of weight .*use id\(p\), or p itself"):
        compiled(model, lambda m, x: squares(m, x) * factors[m.weight.data_ptr()])


# -------------------------------------------------------------------------------- cached results


class Schedule:
    """Gives a number that is kept until somebody clears the cache."""

    def __init__(self) -> None:
        self.factor = 1.0

    @lru_cache(maxsize=None)  # noqa: B019, UP033
    def value(self) -> float:
        return self.factor


def with_function(bound: bool, typed: bool) -> tuple[Loss, dict[str, float], Any]:
    held = {"factor": 1.0}

    @lru_cache(maxsize=4 if bound else None, typed=typed)
    def value(power: float, *, more: float = 0.0) -> float:
        return held["factor"] ** power + more

    return lambda m, x: squares(m, x) * value(2, more=0.5) * value(1.0), held, value


@pytest.mark.parametrize("clear_at", [0, 2])
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("typed", [False, True])
def test_results_in_a_cache_that_is_cleared(clear_at: int, bound: bool, typed: bool) -> None:
    loss, held, value = with_function(bound, typed)
    both = Both(linear(), loss)
    for step in range(4):
        both.step()
        held["factor"] *= 0.5
        if step >= clear_at:
            value.cache_clear()


def test_results_of_a_method_in_a_cache_that_is_cleared() -> None:
    schedule = Schedule()
    both = Both(linear(), lambda m, x: squares(m, x) * schedule.value())
    for _ in range(3):
        both.step()
        schedule.factor *= 0.5
        Schedule.value.cache_clear()


def test_a_cache_that_is_cleared_and_gives_the_same_needs_no_plan(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO", "weft")
    loss, _, value = with_function(True, False)
    both = Both(linear(), loss)
    for _ in range(3):
        both.step()
        value.cache_clear()
    assert not [text for text in caplog.messages if "planned the step again" in text]


def test_a_cached_function_that_fails_later_fails_in_the_step() -> None:
    held = {"factor": 1.0}

    @lru_cache
    def value() -> float:
        return held["factor"]

    program = compiled(linear(), lambda m, x: squares(m, x) * value())
    program.step(torch.ones(8, 8))
    held.clear()
    value.cache_clear()
    with pytest.raises(Exception, match="factor"):
        program.step(torch.ones(8, 8))
