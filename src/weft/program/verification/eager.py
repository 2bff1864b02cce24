"""The user's own step on one device, run by plain PyTorch."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from weft.capture.outputs import find_loss
from weft.capture.precision import Casts
from weft.capture.tracing.before import restored
from weft.capture.tracing.lending import lent, write_replaced
from weft.capture.tree import flatten, unflatten
from weft.errors import VerificationError
from weft.program.live.holds import named_variables
from weft.program.planning.step import Step
from weft.program.verification.draws import drawn
from weft.program.verification.plainly import plainly


@final
@dataclass(frozen=True)
class Eager:
    """The results of a plain step.

    Attributes:
        outputs: leaves of what the loss function returned, in order, by their paths.
        gradients: by parameter; empty in evaluation.
        tensors: parameters and buffers after the backward, before the update.
    """

    outputs: dict[str, Any]
    gradients: dict[str, Tensor]
    tensors: dict[str, Tensor]


@final
@dataclass(frozen=True)
class PlainStep:
    """A step that runs plainly.

    Attributes:
        casts: the precision of the strategy.
        micro_batches: their number; each BatchNorm takes statistics of its own of each.
        seed, number: of the program, and of its step.
        scale: of the loss, with float16.
    """

    step: Step
    casts: Casts
    micro_batches: int = 1
    draws: tuple[Any, ...] = ()
    seed: int = 0
    number: int = 0
    scale: float = 1.0

    def run(self, values: Mapping[str, Tensor], batch: Any) -> Eager:
        """One step, forward and backward; nothing of the user is changed by it.

        Args:
            values: of all parameters and buffers, whole.
            batch: of ordinary tensors, whole.
        """
        model, training = self.step.model, bool(self.step.optimizers)
        tensors = named_variables(model)
        values = {key: value.clone() for key, value in values.items()}
        with (
            restored(model, self.step.loss_fn, everything=True),
            plainly(tensors, values),
            torch.random.fork_rng(devices=_devices(values)),
            _as_written(),
            _statistics_apart(self.micro_batches),
            torch.set_grad_enabled(training),
        ):
            if not training:
                model.eval()
            with drawn(self.draws, self.seed, self.number) as mode:
                outputs = self._run(tensors, _fresh(batch))
            if mode is not None and mode.left:
                raise VerificationError(
                    f"the compiled step draws {mode.left} random tensors that a plain eager step does not draw, or "
                    "in another order; what it draws must not depend on what changes from call to call"
                )
            # Buffers may be other tensors now; in the places of parameters, casts may be.
            after = _copies({**tensors, **dict(model.named_buffers())})
            return Eager(outputs, _gradients(tensors, self.scale), after)

    def _run(self, tensors: Mapping[str, Tensor], batch: Any) -> dict[str, Any]:
        """The forward and the backward; the leaves of what the loss function returned."""
        model = self.step.model
        with ExitStack() as stack:
            places = stack.enter_context(self._cast(tensors))
            with self.casts.around(model):
                result = self.step.loss_fn(model, batch)
            if self.step.optimizers:
                loss = find_loss(result)
                loss.backward(torch.full_like(loss, self.scale))  # type: ignore[no-untyped-call]
            leaves, _ = flatten(result, "output")
            found = {path: x.detach().clone() if isinstance(x, Tensor) else x for path, x in leaves}
            if places:
                write_replaced(places, ())
        return found

    def _cast(self, tensors: Mapping[str, Tensor]) -> Any:
        """Casts of the parameters in their places, where the strategy asks for them."""
        if self.casts.parameters is None:
            return nullcontext(())
        stand_ins = {
            id(own): self.casts.parameter(own) if isinstance(own, nn.Parameter) else own
            for own in tensors.values()
        }
        return lent(self.step.model, stand_ins)


@contextmanager
def _as_written() -> Iterator[None]:
    """While this lasts, what the user compiled with `torch.compile` runs as it was written."""
    if "torch._dynamo.config" not in sys.modules:  # nothing was; it takes seconds to import
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def _statistics_apart(parts: int) -> Iterator[None]:
    """While this lasts, every BatchNorm takes statistics of each micro-batch, as accumulated steps do."""
    forward = _BatchNorm.forward

    def in_parts(norm: _BatchNorm, x: Tensor) -> Tensor:
        takes = norm.training or norm.running_mean is None
        if not takes or x.shape[0] % parts:
            return forward(norm, x)
        return torch.cat([forward(norm, part) for part in x.chunk(parts)])

    with patch.object(_BatchNorm, "forward", in_parts) if parts > 1 else nullcontext():
        yield


def _fresh(batch: Any) -> Any:
    """Copies of the tensors of a batch, which the step may write to."""
    leaves, tree = flatten(batch, "batch")
    return unflatten([x.clone() if isinstance(x, Tensor) else x for _, x in leaves], tree)


def _gradients(tensors: Mapping[str, Tensor], scale: float) -> dict[str, Tensor]:
    return {key: x.grad / scale for key, x in tensors.items() if x.grad is not None}


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {key: tensor.detach().clone() for key, tensor in tensors.items()}


def _devices(values: Mapping[str, Tensor]) -> list[int]:
    found = {x.device.index or 0 for x in values.values() if x.device.type == "cuda"}
    return sorted(found)
