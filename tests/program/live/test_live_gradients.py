"""Gradients of the live model: of steps without an update, of eager losses, and updates by either."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import weft
from program import live_models
from program.live_models import STRATEGIES, Net, Twins, batch, loss_fn, twins
from single_device import adamw, whole
from weft.errors import UserError

every_strategy = pytest.mark.parametrize("name", STRATEGIES)


def held(both: Twins) -> None:
    """A step without an update, and `backward()` on the plain copy."""
    given = both.next_batch()
    loss = loss_fn(both.plain, given)
    loss.backward()
    assert both.program.step(given, update=False).item() == pytest.approx(loss.item(), rel=1e-9)


def backward(model: nn.Module, seed: int) -> None:
    loss_fn(model, batch(seed)).backward()


def assert_same_gradients(both: Twins) -> None:
    for live, plain in zip(both.model.parameters(), both.plain.parameters(), strict=True):
        assert live.grad is not None
        assert plain.grad is not None
        torch.testing.assert_close(whole(live.grad), plain.grad, rtol=1e-8, atol=1e-12)


def update(both: Twins, clip_norm: float | None = None) -> torch.Tensor:
    """`program.update()`, and the optimizer's step on the plain copy; the norm of all gradients."""
    limit = float("inf") if clip_norm is None else clip_norm
    norm = nn.utils.clip_grad_norm_(both.plain.parameters(), limit)
    both.other.step()
    both.other.zero_grad()
    both.program.update()
    return norm


@contextmanager
def clipped(name: str, clip_norm: float | None, **options: Any) -> Iterator[Twins]:
    grid, strategy = STRATEGIES[name]
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(live_models.STRATEGIES, name, (grid, replace(strategy, clip_norm=clip_norm)))
        with twins(name, **options) as both:
            yield both


@every_strategy
def test_gradients_stay_and_add_up(name: str) -> None:
    with twins(name) as both:
        both.step()
        assert all(parameter.grad is None for parameter in both.model.parameters())
        for _ in range(2):
            held(both)
            assert_same_gradients(both)
        update(both)
        assert all(parameter.grad is None for parameter in both.model.parameters())
        both.check()
        held(both)
        backward(both.plain, 70)
        both.program.step(batch(70))
        both.other.step()
        both.other.zero_grad()
        assert all(parameter.grad is None for parameter in both.model.parameters())
        both.step()
        both.check()


@every_strategy
def test_gradients_that_users_change(name: str) -> None:
    def halved(model: Net, _: Any) -> None:
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.grad.mul_(0.5)
        model.last.bias.grad = None

    with twins(name) as both:
        held(both)
        both.both(halved)
        update(both)
        both.check()
        held(both)
        both.both(lambda _, optimizer: optimizer.zero_grad())
        both.step()
        both.check()


@every_strategy
def test_the_users_optimizer_steps_by_them(name: str) -> None:
    with twins(name) as both:
        held(both)
        both.both(lambda model, _: nn.utils.clip_grad_norm_(model.parameters(), 0.05))
        both.both(lambda _, optimizer: optimizer.step())
        both.both(lambda _, optimizer: optimizer.zero_grad())
        both.step()
        both.check()


@every_strategy
def test_updates_by_the_gradients_of_eager_losses(name: str) -> None:
    with twins(name) as both:
        both.both(lambda model, _: backward(model, 71))
        update(both)
        both.both(lambda model, _: backward(model, 72))
        held(both)
        both.both(lambda model, _: backward(model, 73))
        assert_same_gradients(both)
        update(both)
        both.step()
        both.check()


@every_strategy
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_a_step_adds_to_the_gradients_of_eager_losses(name: str, clip_norm: float | None) -> None:
    def eager(both: Twins, seed: int) -> None:
        both.both(lambda model, _: backward(model, seed))

    with clipped(name, clip_norm) as both:
        for seed in (90, 91):
            eager(both, seed)
            given = both.next_batch()
            loss = loss_fn(both.plain, given)
            loss.backward()
            if clip_norm is not None:
                nn.utils.clip_grad_norm_(both.plain.parameters(), clip_norm)
            both.other.step()
            both.other.zero_grad()
            assert both.program.step(given).item() == pytest.approx(loss.item(), rel=1e-9)
            assert all(parameter.grad is None for parameter in both.model.parameters())
        eager(both, 92)
        both.both(lambda _, optimizer: optimizer.zero_grad())
        both.program.step(batch(93))
        backward(both.plain, 93)
        if clip_norm is not None:
            nn.utils.clip_grad_norm_(both.plain.parameters(), clip_norm)
        both.other.step()
        both.check()


@every_strategy
def test_gradients_that_an_optimizer_has_used_are_cleared(name: str) -> None:
    """As in loops that clear before `backward`; before compiling, too."""
    with twins(name, trained) as both:
        both.step()
        for seed in (95, 96):
            both.both(lambda model, _, seed=seed: backward(model, seed))
            both.both(lambda _, optimizer: optimizer.step())
            both.other.zero_grad()
            both.step()
        both.check()


def trained() -> Net:
    """With gradients of a loop that goes on."""
    torch.manual_seed(0)
    model = Net().double()
    backward(model, 94)
    return model


def test_gradients_that_are_added_to_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    with twins("data") as both:
        for seed in (94, 95):
            both.both(lambda model, _, seed=seed: backward(model, seed))
            both.program.step(batch(1))
    said = [record for record in caplog.records if "adds to the gradients" in record.message]
    assert len(said) == 1


@pytest.mark.parametrize("name", ["data", "pipeline"])
def test_gradients_that_no_step_uses_are_refused(name: str) -> None:
    """Of a parameter that the step does not train, but that the optimizer would update."""
    words = r"last\.weight has a gradient, but no step of this program updates it"
    with twins(name, frozen_last) as both:
        both.both(lambda model, _: model.requires_grad_(True))
        both.both(lambda model, _: backward(model, 95))
        both.model.last.weight.requires_grad_(False)
        for call in (lambda: both.program.step(batch(1)), both.program.update):
            with pytest.raises(UserError, match=words):
                call()
        both.both(lambda model, _: model.requires_grad_(True).zero_grad())
        both.step()
        both.check()


def frozen_last() -> Net:
    model = Net()
    model.last.weight.requires_grad_(False)
    return model


@every_strategy
@pytest.mark.parametrize("clip_norm", [None, 0.05])
def test_the_norm_of_all_gradients(name: str, clip_norm: float | None) -> None:
    def norm(both: Twins) -> float:
        return float(both.program.metrics["grad_norm"])

    def plain_step(both: Twins, seed: int) -> torch.Tensor:
        backward(both.plain, seed)
        limit = float("inf") if clip_norm is None else clip_norm
        found = nn.utils.clip_grad_norm_(both.plain.parameters(), limit)
        both.other.step()
        both.other.zero_grad()
        return found

    with clipped(name, clip_norm, metrics=["grad_norm"]) as both:
        both.program.step(batch(80))
        assert norm(both) == pytest.approx(plain_step(both, 80).item(), rel=1e-9)
        held(both)
        held(both)
        expected = update(both, clip_norm).item()
        assert clip_norm is None or expected > 1.1 * clip_norm
        assert norm(both) == pytest.approx(expected, rel=1e-9)
        held(both)
        both.program.step(batch(81))
        assert norm(both) == pytest.approx(plain_step(both, 81).item(), rel=1e-9)
        both.check()


@every_strategy
def test_parameters_that_are_frozen_and_thawed(name: str) -> None:
    def frozen(flag: bool) -> Callable[[Net, Any], None]:
        return lambda model, _: [p.requires_grad_(not flag) for p in model.first.parameters()]  # type: ignore[return-value]

    with twins(name) as both:
        both.step()
        both.both(frozen(True))
        both.step()
        held(both)
        assert both.model.first.weight.grad is None
        update(both)
        both.both(frozen(False))
        both.step()
        both.check()


def test_an_update_without_gradients_is_refused() -> None:
    with twins("data") as both:
        with pytest.raises(UserError, match="update.. found no gradients"):
            both.program.update()
        both.step()
        with pytest.raises(UserError, match="update.. found no gradients"):
            both.program.update()


def test_a_program_without_an_optimizer_does_not_update() -> None:
    with twins("data") as both:
        evaluation = both.program.evaluation(loss_fn, batch(0))
        with pytest.raises(UserError, match="has no optimizer"):
            evaluation.update()
        both.program.close()
        with pytest.raises(UserError, match="was closed"):
            both.program.update()


@pytest.mark.one_process
def test_a_metric_that_is_not_known_is_refused() -> None:
    torch.manual_seed(0)
    model = Net().double()
    with pytest.raises(
        UserError, match=r"metrics= must be names among \['grad_norm'\], got 'loss'"
    ):
        weft.compile(
            model,
            loss_fn,
            adamw(model),
            batch(0),
            placement=weft.placement("cpu", [0]),
            metrics=["loss"],  # type: ignore[list-item]
        )


def test_parameters_without_an_optimizer_are_named_once(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 1))
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters()}, {"params": [model[1].weight], "lr": 0.0}], lr=0.1
    )
    with weft.local_world(1):
        program = weft.compile(
            model,
            lambda m, x: m(x).sum(),
            optimizer,
            torch.ones(8, 4),
            placement=weft.placement("cpu", [0]),
        )
        for _ in range(2):
            program.step(torch.ones(8, 4), update=False)
        program.close()
    assert model[1].weight.grad is not None
    assert model[1].bias.grad is None
    assert caplog.text.count("no gradient in parameter.grad of 1.bias") == 1
