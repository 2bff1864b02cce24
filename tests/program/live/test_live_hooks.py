"""Hooks on the parameters of a live model that come and go between steps: planned anew, or refused."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch

import weft
from program.live_models import Net, batch, loss_fn, twins
from single_device import adamw
from weft.errors import CaptureError

some_strategies = pytest.mark.parametrize("name", ["one rank", "zero 3", "pipeline"])


def halved(gradient: torch.Tensor) -> torch.Tensor:
    return gradient * 0.5


@some_strategies
def test_a_hook_that_is_registered_later_counts_from_the_next_step(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "weft")
    handles: list[Any] = []

    def hooked(model: Any, _: Any) -> None:
        handles.append(model.first.weight.register_hook(halved))

    with twins(name) as both:
        both.step()
        both.both(hooked)
        both.step()
        both.both(lambda model, _: loss_fn(model, batch(7)).backward())
        both.step()
        for handle in handles:
            handle.remove()
        both.step()
        both.both(hooked)
        both.step()
        both.check()
    said = [text for text in caplog.messages if "planned the step again" in text]
    assert len(said) == 1
    assert "the number of hooks of first.weight was 0 and is 1" in said[0]


@some_strategies
def test_hooks_of_a_layer_in_another_order_count(name: str) -> None:
    def hooked(model: Any, _: Any) -> None:
        model.first.register_forward_hook(lambda layer, x, y: y * 2)
        model.first.register_forward_hook(lambda layer, x, y: y + 1)

    def exchange(model: Any, _: Any) -> None:
        hooks = model.first._forward_hooks
        hooks.move_to_end(next(iter(hooks)))

    with twins(name) as both:
        both.both(hooked)
        both.step()
        both.both(exchange)
        both.step()
        both.check()


@some_strategies
def test_a_hook_in_the_place_of_another_counts(name: str) -> None:
    def hooked(scale: float) -> Any:
        def register(model: Any, _: Any) -> None:
            model.handle = model.last.bias.register_hook(lambda gradient: gradient * scale)

        return register

    with twins(name) as both:
        both.both(hooked(0.5))
        both.step()
        both.both(lambda model, _: model.handle.remove())
        both.both(hooked(2.0))
        both.step()
        both.check()


@some_strategies
def test_a_hook_after_accumulation_is_refused_while_it_is_there(name: str) -> None:
    with twins(name) as both:
        both.step()
        handle = both.model.last.weight.register_post_accumulate_grad_hook(lambda _: None)
        for update in (True, False):
            with pytest.raises(CaptureError, match=r"last.weight has the hook.*post_accumulate"):
                both.program.step(batch(1), update)
        handle.remove()
        both.step()
        both.check()


def test_a_step_with_another_hook_is_captured_anew() -> None:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = adamw(model)
    step = weft.Step(model, loss_fn, optimizer, batch(0))
    before = step.captured()
    assert step.captured() is before
    handle = model.norm.weight.register_hook(halved)
    assert step.captured() is not before
    handle.remove()
    after = step.captured()
    model.norm.register_forward_hook(lambda *_: None)
    assert step.captured() is not after
