"""Reads whose result changes in later steps: values, addresses and gradients of tensors, states of optimizers.

A tensor from outside has values while a step is captured, and they may differ in later steps. Reading
them is distinguished from computing with the tensor, which the graph does in every step: methods that give memory,
texts or numbers are seen here; ops that give a number, also where torch takes a tensor for one (`x[t]`,
`torch.ones(t)`), by the trace (`weft.capture.fx.private.trace`). Tensors of the step have no values yet, and are
refused. Gradients, optimizer states and addresses belong to the time between steps; a step must not read them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from threading import get_ident
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import TensorBase
from torch.utils._python_dispatch import _disable_current_modes

from weft.capture.fx.generators import redirect_calls
from weft.capture.fx.private import Refusal, is_fake
from weft.capture.optimizer_groups import Optimizers
from weft.capture.python.unbacked import refuse_value
from weft.capture.python_guards import BitwiseEqual
from weft.errors import CaptureError
from weft.files import PACKAGE, in_library

# Methods that read memory past all ops. The latter ones torch and weft call of any tensor, for other ends.
_MEMORY = (
    *("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__"),
    *("__reduce_ex__", "__deepcopy__"),
)
_ADDRESSES = ("data_ptr", "untyped_storage", "storage", "_typed_storage")
# The ones that cannot give anything of a tensor without data; and of one that has some, while modes are on.
_NOT_YET = ("numpy", "__array__", "__dlpack__", "__reduce_ex__", "storage", "_typed_storage")
_NOT_HERE = ("__reduce_ex__", "untyped_storage", "storage", "_typed_storage")
# Methods that read a number by an op (as `item` does), which a trace sees unless torch has switched that off, as in
# `torch.tensor([t])`.
_NUMBERS = ("__bool__", "__int__", "__float__", "__complex__", "__index__")
_PYTHON = torch._C.DispatchKey.Python
_excluded = torch._C._dispatch_tls_is_dispatch_key_excluded
# Up to how many values are kept as numbers, which messages show.
_SHOWN = 16

_Grad: Any = Tensor.grad
_ONCE = "captured once, the step would always read the value of now"
_STATES = (
    f"reads the state of an optimizer, which every step changes: {_ONCE}. Keep what it needs in buffers of the model, "
    "written by the step, or read optimizer.state between steps and pass it in the batch"
)
_ADDRESS = (
    "asks for the address of {} (data_ptr), which does not exist during capture, and which later steps may change; "
    "use id(p), or p itself, as the key"
)
_GRADIENT = (
    f"{{}} the gradient of {{}}, which is left by earlier steps: {_ONCE}. Call zero_grad outside of the step, where it "
    "is needed at all; read gradients after program.step(batch, update=False), and pass them in the batch; "
    "torch.autograd.grad gives those of the step itself"
)
_MOVES = (
    "moves or casts a module, {} (`to`, `float`, `cuda` and the like), from {} on {} to {} on {}: its tensors would be "
    "others from then on, also in later steps. Move it before compiling; cast inputs, or let autocast cast"
)


@contextmanager
def reads_noted(
    note: Callable[[Tensor, str], None], stand_ins: Mapping[int, Tensor], names: Mapping[int, str]
) -> Iterator[None]:
    """Within the context, methods that give the values of a tensor to Python are noted, or refused.

    The step may not read or set gradients, move modules, read an optimizer's state or an address. Gradients of tensors
    that it makes itself are its own, and modules that are where they should be may stay.

    Args:
        note: called with an outside tensor that is read, and the reader.
        stand_ins: of the model's own tensors, by the ids of these.
        names: of the model's parameters, by the ids of these and of their stand-ins.

    Raises:
        Refusal: when the step does so.
    """
    values = _ReadsOfTensors(note, stand_ins, names).values
    # No function mode sees what hooks do in a backward.
    gradients = property(
        _gradient("reads", _Grad.__get__, names),
        _gradient("sets", _Grad.__set__, names),
        _gradient("sets", _Grad.__delete__, names),
    )
    with (
        redirect_calls(
            (torch.optim.Optimizer, "__getattribute__", _without_state),
            (torch.nn.Module, "_apply", lambda _: _check_unmoved),
            *((Tensor, x, partial(values, x)) for x in (*_MEMORY, *_ADDRESSES, *_NUMBERS)),
        ),
        patch.object(Tensor, "grad", gradients),
    ):
        yield


@final
@dataclass(slots=True)
class _ReadsOfTensors:
    note: Callable[[Tensor, str], None]
    stand_ins: Mapping[int, Tensor]
    names: Mapping[int, str]

    def values(self, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            seen = name in _NUMBERS and not _excluded(_PYTHON)
            # `sys._getframe(2)` is the caller, beyond what `redirect_calls` has put there.
            library = name in _ADDRESSES and in_library(sys._getframe(2).f_code.co_filename)
            if library or seen:
                return plain(tensor, *args, **kwargs)
            tensor = self.stand_ins.get(id(tensor), tensor)
            if name in (_NOT_YET if is_fake(tensor) else _NOT_HERE):
                raise refuse_value(f"Tensor.{name}")
            if name == "data_ptr" and is_fake(tensor):
                raise Refusal(_ADDRESS.format(self.names.get(id(tensor), "a tensor")))
            if is_fake(tensor) or hasattr(type(tensor), "sbp"):
                return plain(tensor, *args, **kwargs)
            self.note(tensor, f"Tensor.{name}")
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return plain(tensor, *args, **kwargs)

        return read


def _gradient(verb: str, plain: Callable[..., Any], names: Mapping[int, str]) -> Any:
    own = get_ident()

    def checked(tensor: Tensor, *value: Any) -> Any:
        if get_ident() == own:
            name = names.get(id(tensor))
            if name is not None or not (is_fake(tensor) or _from_torch()):
                raise Refusal(_GRADIENT.format(verb, name or "a tensor from outside"))
        return plain(tensor, *value)

    return checked


def _without_state(plain: Callable[..., Any]) -> Callable[..., Any]:
    def read(optimizer: torch.optim.Optimizer, name: str) -> Any:
        if name == "state":
            raise Refusal(_STATES)
        return plain(optimizer, name)

    return read


def values_of(tensor: Tensor) -> BitwiseEqual | bytes:
    """The values of a tensor, to be compared: as numbers, or many of them as bytes."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        if tensor.numel() <= _SHOWN:
            return BitwiseEqual(TensorBase.tolist(tensor))
        plain = tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
        return TensorBase.numpy(plain.reshape(-1).view(torch.uint8)).tobytes()


def _check_unmoved(
    module: torch.nn.Module, function: Callable[..., Any], recurse: bool = True
) -> torch.nn.Module:
    """Do in a step as `to`, `float` and the like: nothing, where all lies already as they would lay it."""
    for tensor in (*module.parameters(recurse), *module.buffers(recurse)):
        with torch.no_grad():
            made = function(tensor)
        if made is not tensor and _lies(made) != _lies(tensor):
            kinds = (each for x in (tensor, made) for each in (x.dtype, x.device))
            raise Refusal(_MOVES.format(type(module).__name__, *kinds))
    return module


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    return id(tensor.untyped_storage()), tensor.dtype, tensor.shape, tensor.stride()


def check_no_backward(parameters: Iterable[Tensor]) -> None:
    """Check that the loss function has left no gradients on the parameters' stand-ins.

    Raises:
        CaptureError: when it has: in plain PyTorch they would add to those of the loss.
    """
    if any(each is not None for each in gradients_left(parameters)):
        raise CaptureError(
            "the loss function runs backward(); weft makes the gradients of the loss that it returns, and the update: "
            "leave backward(), optimizer.step() and zero_grad() out of it, and use torch.autograd.grad for gradients "
            "inside the loss"
        )


def gradients_left(parameters: Iterable[Tensor]) -> list[Tensor | None]:
    """The gradients that a backward of the user's has left on the parameters' stand-ins."""
    with torch._C.DisableTorchFunction():
        return [_Grad.__get__(each) for each in parameters]


def check_constants(constants: Iterable[Tensor], optimizers: Optimizers) -> None:
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


def _from_torch() -> bool:
    """True if the running call of a tensor's method was made by torch's own Python."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(PACKAGE):
        frame = frame.f_back
    return in_library(frame.f_code.co_filename)
