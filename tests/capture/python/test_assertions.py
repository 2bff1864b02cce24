"""Checks of Python that only raise run in the graph, in every step; other truth tests are refused.

PYTEST_DONT_REWRITE: the asserts here are to be compiled as they are in a model.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import weft
from single_device import assert_same_training, compiled, plain_training
from weft.capture import capture
from weft.errors import CaptureError, RankFailure

pytestmark = [
    pytest.mark.usefixtures("double_precision"),
    pytest.mark.skipif(sys.version_info < (3, 11), reason="Python does not tell what it tests"),
]


def plain_if(x: Tensor) -> None:
    if (x < 0).any():
        raise ValueError("negative")


def negated(x: Tensor) -> None:
    if not (x >= 0).all():
        message = f"negative among {x.shape}"
        raise ValueError(message)


def either(x: Tensor) -> None:
    if x.dim() != 2 or (x < 0).any() or not torch.isfinite(x).all():
        raise ValueError("negative or infinite")


def last_of_several(x: Tensor) -> None:
    if x.dim() == 2 and (x < 0).any():
        raise ValueError("negative")


def asserted(x: Tensor) -> None:
    assert (x >= 0).all() and x.dim() == 2, "negative"  # noqa: PT018


def chain_that_holds(x: Tensor) -> None:
    assert -1 < 0 <= x.min() < 2 and x.dim() == 2, "negative"  # noqa: PT018


def negated_chain(x: Tensor) -> None:
    if not 0 <= x.min() < 2:
        raise ValueError("negative")


def second_branch(x: Tensor) -> None:
    if x.dim() > 2:
        return
    elif x.min() < 0:  # noqa: RET505
        raise ValueError("negative")


def by_torch(x: Tensor) -> None:
    torch._assert_async((x >= 0).all(), "negative")


def by_a_distribution(x: Tensor) -> None:
    torch.distributions.Normal(torch.zeros_like(x), x + 1e-3, validate_args=True)


CHECKS = [plain_if, negated, either, last_of_several, asserted, second_branch]
CHECKS += [chain_that_holds, negated_chain, by_torch, by_a_distribution]


def checking(check: Callable[[Tensor], None]) -> Callable[..., Tensor]:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        check(batch["x"])
        return model(batch["x"]).square().mean()

    return loss


@contextmanager
def raises_on_a_rank(text: str) -> Iterator[None]:
    with pytest.raises(RankFailure, match="UserError") as failure:
        yield
    assert "the step fails a check" in str(failure.value)
    assert text in str(failure.value)


STRATEGIES = {
    "data parallel": ([0, 1], weft.data_parallel()),
    "micro-batches": ([0, 1], weft.Strategy(batch={"*": weft.split(0)}, micro_batches=2)),
    "two stages": ([0, 1], weft.Strategy(stages=2, micro_batches=2)),
    "whole": ([0], weft.Strategy()),
}


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_a_check_runs_in_every_step(check: Callable[[Tensor], None]) -> None:
    torch.manual_seed(0)
    model, loss = nn.Linear(4, 3), checking(check)
    good = {"x": torch.rand(8, 4)}
    bad = {"x": good["x"].index_fill(0, torch.tensor([7]), -1.0)}
    expected = plain_training(model, loss, [good] * 2)
    with compiled(model, loss, good, [0, 1], weft.data_parallel()) as program:
        assert_same_training(program, [good] * 2, expected)
        with raises_on_a_rank("test_assertions.py:"):
            program.step(bad)


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_loss_of_torch_with_a_check(name: str) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mean, variance = model(batch["x"]).chunk(2, -1)
        return F.gaussian_nll_loss(mean, batch["y"], variance.exp() + batch["more"])

    torch.manual_seed(0)
    grid, strategy = STRATEGIES[name]
    model, more = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 6)), torch.zeros(8, 1)
    good = {"x": torch.randn(8, 4), "y": torch.randn(8, 3), "more": more}
    bad = {**good, "more": more - 100}
    expected = plain_training(model, loss, [good] * 2)
    with compiled(model, loss, good, grid, strategy) as program:
        assert_same_training(program, [good] * 2, expected)
        with raises_on_a_rank("var has negative entry/entries"):
            program.step(bad)


@pytest.mark.parametrize("clip_norm", [None, 1.0])
def test_a_check_in_micro_batches_comes_before_the_update(clip_norm: float | None) -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        y = model(batch["x"])
        if (y > 100).any():
            raise ValueError("large")
        return y.square().mean()

    torch.manual_seed(0)
    model, good = nn.Linear(4, 3), {"x": torch.randn(8, 4)}
    bad = {"x": good["x"] * 1e4}
    strategy = replace(weft.data_parallel(), micro_batches=2, clip_norm=clip_norm)
    with compiled(model, loss, good, [0, 1], strategy) as program:
        program.step(good)
        before = program.full_state_dict()
        for _ in range(2):
            with raises_on_a_rank('raise ValueError("large")'):
                program.step(bad)
        for name, value in program.full_state_dict().items():
            assert torch.equal(before[name], value)
        program.step(good)  # as nothing has changed


def a_branch(x: Tensor) -> Tensor:
    if (x < 0).any():
        x = x * 2
    return x


def returns_before_raising(x: Tensor) -> Tensor:
    if (x < 0).any():
        if x.dim() > 1:
            return x * 2
        raise ValueError("negative")
    return x


def first_of_several(x: Tensor) -> Tensor:
    if (x < 0).any() and x.dim() > 2:
        raise ValueError("negative")
    return x


def a_number(x: Tensor) -> Tensor:
    if x.min().item() < 0:
        raise ValueError("negative")
    return x


def a_helper(x: Tensor) -> Tensor:
    if bool((x < 0).any()):
        raise ValueError("negative")
    return x


def a_choice(x: Tensor) -> Tensor:
    if (x.dim() if (x < 0).any() else 0) > 5:
        raise ValueError("negative")
    return x


def a_chain(x: Tensor) -> Tensor:
    if 5 < x.max() < 6:
        raise ValueError("between")
    return x


def a_chain_among_others(x: Tensor) -> Tensor:
    if x.dim() > 2 or not (x.dim() > 2 or not 5 < x.max() < 6):
        raise ValueError("between")
    return x


def a_chain_that_must_fail(x: Tensor) -> Tensor:
    assert not 5 < x.max() < 6
    return x


def a_chosen_test(x: Tensor) -> Tensor:
    if (x > 5).any() if (x > 7).any() else (x > 8).any():
        raise ValueError("negative")
    return x


def a_named_test(x: Tensor) -> Tensor:
    if negative := (x < 0).any():
        raise ValueError(negative)
    return x


def any_of_several(x: Tensor) -> Tensor:
    if any(one < 0 for one in x[0]):
        raise ValueError("negative")
    return x


def all_but_some(x: Tensor) -> Tensor:
    if not all([one >= 0 for one in x[0] if one < 5]):  # noqa: C419
        raise ValueError("negative")
    return x


def a_guard(x: Tensor) -> Tensor:
    match x.dim():
        case 2 if (x < 0).any():
            raise ValueError("negative")
    return x


def a_value_of_several(x: Tensor) -> Tensor:
    if ((x < 0).any() and x).sum() < 0:
        raise ValueError("negative")
    return x


OTHERS = [a_branch, returns_before_raising, first_of_several, a_number, a_helper, a_choice]
OTHERS += [a_chain, a_chain_among_others, a_chain_that_must_fail, a_chosen_test, a_named_test]
OTHERS += [any_of_several, all_but_some, a_guard, a_value_of_several]


@pytest.mark.parametrize("function", OTHERS, ids=lambda function: function.__name__)
def test_no_branch_is_guessed(function: Callable[[Tensor], Tensor]) -> None:
    def loss(model: nn.Module, batch: Tensor) -> dict[str, Any]:
        return {"x": function(batch)}

    function(torch.full((8, 4), 0.5)), function(torch.full((8, 4), 7.0))  # raises nothing
    with pytest.raises(CaptureError, match="values in a tensor"):
        capture(nn.Linear(1, 1), loss, None, torch.rand(8, 4), training=False)
