"""Gradients that a backward inside of the step's backward adds to parameters: in the gradients of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import weft
from single_device import compiled, plain_training
from weft.errors import CaptureError, VerificationError

Batch = dict[str, torch.Tensor]
S = weft.split


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.last = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 4)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def batches(count: int = 3) -> list[Batch]:
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(count, 8, 10, dtype=torch.float64, generator=generator)
    return [{"x": each[:, :6], "y": each[:, 6:]} for each in rows]


def distance(found: torch.Tensor, batch: Batch) -> torch.Tensor:
    return (found - batch["y"]).square().mean()


class Again(torch.autograd.Function):
    """A layer that runs again in the backward, as checkpoints do that are written by hand."""

    @staticmethod
    def forward(ctx: Any, layer: nn.Module, x: torch.Tensor, _: Any = None) -> Any:
        ctx.layer = layer
        ctx.variable = "a name that autograd has, too"
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @classmethod
    def again(cls, ctx: Any) -> tuple[torch.Tensor, torch.Tensor]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            return x, ctx.layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, y = Again.again(ctx)
        torch.autograd.backward(y, gradients[0])
        return None, x.grad, None


class Dot(Again):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, y = Again.again(ctx)
        with torch.enable_grad():
            (y * gradients[0]).sum().backward()  # type: ignore[no-untyped-call]
        return None, x.grad, None


class Inputs(Again):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, y = Again.again(ctx)
        torch.autograd.backward(y, gradients[0], inputs=[x, ctx.layer.weight])
        return None, x.grad, None


class Twice(Again):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, y = Again.again(ctx)
        torch.autograd.backward(y, gradients[0], retain_graph=True)
        torch.autograd.backward(y, gradients[0])
        return None, x.grad, None


class Nested(Again):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y: Any = Again.apply(ctx.layer, x)  # type: ignore[no-untyped-call]
        torch.autograd.backward(y, gradients[0])
        return None, x.grad, None


class Reading(Again):
    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        x, y = Again.again(ctx)
        torch.autograd.backward(y, gradients[0])
        ctx.layer.weight.grad = None
        return None, x.grad, None


def through(function: Any) -> Callable[[Any, Batch], torch.Tensor]:
    """A step whose layer is run by a function of autograd."""

    def loss(model: Net, batch: Batch) -> torch.Tensor:
        return distance(model.last(function.apply(model.layer, model.first(batch["x"]))), batch)

    return loss


def several(model: Net, batch: Batch) -> torch.Tensor:
    """The layer twice by the function, and once by itself."""
    x = model.first(batch["x"]).tanh()
    again: Any = Again.apply(model.layer, Again.apply(model.layer, x).sin())  # type: ignore[no-untyped-call]
    return distance(model.last(again + model.layer(x)), batch)


def asked_by_a_dummy(model: Net, batch: Batch) -> torch.Tensor:
    """No parameter lies below the function, whose output asks for a gradient by a tensor of no use."""
    dummy = torch.zeros((), requires_grad=True)
    x: Any = Again.apply(model.first, batch["x"], dummy)  # type: ignore[no-untyped-call]
    return distance(model.last(x.tanh()), batch)


def in_a_hook(model: Net, batch: Batch) -> torch.Tensor:
    def hook(gradient: torch.Tensor) -> None:
        with torch.enable_grad():
            model.layer(gradient.detach()).square().sum().backward()

    x = model.first(batch["x"])
    x.register_hook(hook)
    return distance(model.last(x), batch)


def checkpointed(model: Net, batch: Batch) -> torch.Tensor:
    def layer(x: torch.Tensor) -> Any:
        return Again.apply(model.layer, x)  # type: ignore[no-untyped-call]

    x = checkpoint(layer, model.first(batch["x"]), use_reentrant=True)
    return distance(model.last(x), batch)


def around_a_checkpoint(model: Net, batch: Batch) -> torch.Tensor:
    def layer(x: torch.Tensor) -> Any:
        return checkpoint(model.layer, x, use_reentrant=True)

    x: Any = Again.apply(layer, model.first(batch["x"]))  # type: ignore[no-untyped-call]
    return distance(model.last(x), batch)


DATA = weft.Strategy(batch={"*": S(0)})
STEPS = [
    *map(through, (Again, Dot, Inputs, Twice, Nested)),
    asked_by_a_dummy,
    in_a_hook,
    checkpointed,
    around_a_checkpoint,
]
AT = [weft.placement("cpu", [rank]) for rank in range(2)]
PIPELINE = weft.Strategy(
    stages=[weft.Stage(["first", "layer"], placement=AT[0]), weft.Stage(["last"], placement=AT[1])],
    micro_batches=2,
)


@pytest.mark.parametrize(
    ("loss", "strategy"),
    [
        *((loss, DATA) for loss in STEPS),
        (several, DATA),
        (several, weft.Strategy(batch={"*": S(0)}, zero=weft.Zero(3), micro_batches=2)),
        (several, weft.tensor_parallel(["first"], ["layer"])),
        (several, PIPELINE),
    ],
)
def test_they_are_in_the_gradients_of_the_step(loss: Any, strategy: weft.Strategy) -> None:
    expected, trained = plain_training(net(), loss, batches())
    with compiled(net(), loss, batches()[0], [0, 1], strategy) as program:
        found = [program.step(batch).item() for batch in batches()]
        state = program.full_state_dict()
    assert found == pytest.approx(expected, rel=1e-10)
    for name, value in trained.items():
        torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


def refused(loss: Any, words: str) -> None:
    refusing = compiled(net(), loss, batches()[0], [0, 1], DATA)
    with pytest.raises(CaptureError, match=words), refusing:
        pass


def test_verify_sees_those_that_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "weft.capture.tracing.step_call.gradients_left", lambda given: [None for _ in given]
    )
    dropped = compiled(net(), through(Again), batches()[0], [0, 1], DATA)
    with dropped as program, pytest.raises(VerificationError, match=r"layer\.weight"):
        program.verify(batches()[0])


def test_reading_them_is_refused() -> None:
    refused(through(Reading), r"ctx\.layer\.weight\.grad = None")


def test_a_tensor_from_outside_is_given_none() -> None:
    outside = nn.Linear(8, 8).double()

    def loss(model: Net, batch: Batch) -> torch.Tensor:
        return distance(model.last(Again.apply(outside, model.first(batch["x"]))), batch)  # type: ignore[no-untyped-call]

    refused(loss, "a tensor from outside, to which a backward")
    assert outside.weight.grad is None
    assert outside.bias.grad is None
