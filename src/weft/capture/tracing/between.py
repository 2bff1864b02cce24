"""Gradients, optimizer states and addresses: they belong to what is between two steps, and a step reads none."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode

from weft.capture.fx.private import Refusal, is_fake
from weft.capture.optimizers.groups import Optimizers
from weft.errors import CaptureError
from weft.files import PACKAGE, in_library

_Grad: Any = torch.Tensor.grad
_ONCE = "captured once, the step would find for ever what is there now"
_STATES = (
    f"reads the state of an optimizer, which every step changes: {_ONCE}. Keep what it needs in buffers of the model, "
    "written by the step, or read optimizer.state between steps and pass it in the batch"
)
_MOVES = (
    "moves or casts a module, {} (`to`, `float`, `cuda` and the like), from {} on {} to {} on {}: its tensors would be "
    "others from then on, also in later steps. Move it before compiling; cast inputs, or let autocast cast"
)


@contextmanager
def between_steps_refused(names: Mapping[int, str]) -> Iterator[None]:
    """While this lasts, the step may not read or set gradients, move modules, read an optimizer's state or an address.

    Gradients of tensors that the step makes itself are its own, and modules that are where they should be may stay.

    Args:
        names: of the model's parameters, by the ids of these and of their stand-ins.

    Raises:
        Refusal: when the step does so.
    """
    own = threading.get_ident()
    state, move = torch.optim.Optimizer.__getattribute__, torch.nn.Module._apply
    told = _OwnTensors(names)

    def reading(optimizer: torch.optim.Optimizer, name: str) -> Any:
        if name == "state" and threading.get_ident() == own:
            raise Refusal(_STATES)
        return state(optimizer, name)

    def gradient(verb: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def checked(tensor: torch.Tensor, *value: Any) -> Any:
            if threading.get_ident() == own:
                told.gradient(tensor, verb)
            return plain(tensor, *value)

        return checked

    def applied(module: torch.nn.Module, function: Callable[..., Any], recurse: bool = True) -> Any:
        if threading.get_ident() != own:
            return move(module, function, recurse)  # type: ignore[no-untyped-call]
        for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
            with torch.no_grad():
                made = function(tensor)
            if made is not tensor and _lies(made) != _lies(tensor):
                kinds = (each for x in (tensor, made) for each in (x.dtype, x.device))
                raise Refusal(_MOVES.format(type(module).__name__, *kinds))
        return module

    # No function mode sees what hooks do in a backward.
    gradients = property(
        gradient("reads", _Grad.__get__),
        gradient("sets", _Grad.__set__),
        gradient("sets", _Grad.__delete__),
    )
    with (
        patch.object(torch.optim.Optimizer, "__getattribute__", reading),
        patch.object(torch.Tensor, "grad", gradients),
        patch.object(torch.nn.Module, "_apply", applied),
        told,
    ):
        yield


def _lies(tensor: torch.Tensor) -> tuple[Any, ...]:
    return id(tensor.untyped_storage()), tensor.dtype, tensor.shape, tensor.stride()


def check_no_backward(parameters: Iterable[torch.Tensor]) -> None:
    """Check that the loss function has left no gradients on the parameters' stand-ins.

    Raises:
        CaptureError: when it has: in plain PyTorch they would add to those of the loss.
    """
    if any(each is not None for each in gradients_left(parameters)):
        raise CaptureError(
            "the loss function runs backward(); weft makes the gradients of the loss that it returns, and the update: "
            "leave backward(), optimizer.step() and zero_grad() out of it, and take torch.autograd.grad for gradients "
            "that the loss is made of"
        )


def gradients_left(parameters: Iterable[torch.Tensor]) -> list[torch.Tensor | None]:
    """The gradients that a backward of the user's has left on the parameters' stand-ins."""
    with torch._C.DisableTorchFunction():
        return [_Grad.__get__(each) for each in parameters]


def check_constants(constants: Iterable[torch.Tensor], optimizers: Optimizers) -> None:
    """Check that no tensor from outside which a step reads is a state of its optimizers.

    Raises:
        CaptureError: when one is.
    """
    kept = {
        id(value)
        for optimizer in optimizers.each
        for entries in optimizer.state.values()
        if isinstance(entries, dict)
        for value in entries.values()
    }
    if not kept.isdisjoint(map(id, constants)):
        raise CaptureError(f"the step {_STATES}")


@final
class _OwnTensors(TorchFunctionMode):
    """Refuses gradients of tensors that were there before the step, and addresses of those without data."""

    def __init__(self, names: Mapping[int, str]) -> None:
        super().__init__()
        self._names = names

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func == torch.Tensor.data_ptr and is_fake(args[0]) and not _from_torch():
            raise Refusal(
                f"asks for the address of {self._names.get(id(args[0]), 'a tensor')} (data_ptr), which it has not "
                "while it is captured, and which later steps may change; take id(p), or p itself, as the key"
            )
        return func(*args, **(kwargs or {}))

    def gradient(self, tensor: torch.Tensor, verb: str) -> None:
        """Raise Refusal where the gradient of a tensor is not the step's own."""
        name = self._names.get(id(tensor))
        if name is not None or not (is_fake(tensor) or _from_torch()):
            raise Refusal(
                f"{verb} the gradient of {name or 'a tensor from outside'}, which is left by earlier steps: {_ONCE}. "
                "Call zero_grad outside of the step, where it is needed at all; read gradients after "
                "program.step(batch, update=False), and pass them in the batch; torch.autograd.grad gives those of the "
                "step itself"
            )


def _from_torch() -> bool:
    """True where the running call of a tensor's method was made by torch's own Python."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return in_library(frame.f_code.co_filename)
