"""Values of tensors that Python reads while a step is captured: the place through which all ways of reading them go.

A tensor from outside has values while a step is captured, and later steps may find others. Whatever reads them is
told apart from what computes with the tensor, which the graph does in every step: methods that give memory, texts or
numbers are seen here; ops that give a number, also where torch takes a tensor for one (`x[t]`, `torch.ones(t)`), by
the trace (`weft.capture.fx.private.trace`). Tensors of the step have no values yet, and are refused.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._C import TensorBase
from torch.utils._python_dispatch import _disable_current_modes

from weft.capture.fx.private import is_fake
from weft.capture.numbers.later import refuse_value
from weft.capture.watch import Exactly
from weft.files import in_library

# Methods that read memory past all ops. The latter ones torch and weft call of any tensor, for other ends.
_MEMORY = (
    *("tolist", "numpy", "__array__", "__dlpack__", "__repr__", "__format__"),
    *("__reduce_ex__", "__deepcopy__"),
)
_ADDRESSES = ("data_ptr", "untyped_storage", "storage", "_typed_storage")
# Those that cannot give anything of a tensor without data; and of one that has some, while modes are on.
_NOT_YET = ("numpy", "__array__", "__dlpack__", "__reduce_ex__", "storage", "_typed_storage")
_NOT_HERE = ("__reduce_ex__", "untyped_storage", "storage", "_typed_storage")
# Methods that read a number by an op (as `item` does), which a trace sees unless torch has switched that off, as in
# `torch.tensor([t])`.
_NUMBERS = ("__bool__", "__int__", "__float__", "__complex__", "__index__")
_PYTHON = torch._C.DispatchKey.Python
# Up to how many values are kept as numbers, which messages show.
_SHOWN = 16


@contextmanager
def reads_noted(
    note: Callable[[Tensor, str], None], stand_ins: Mapping[int, Tensor]
) -> Iterator[None]:
    """While this lasts, methods that give the values of a tensor to Python are noted, or refused.

    Args:
        note: is told a tensor from outside that is read, and by what.
        stand_ins: of the model's own tensors, by the ids of these.
    """
    own = threading.get_ident()
    noted = [
        (note, stand_ins)
    ]  # nothing once this is over: tables of functions may hold methods longer

    def noting(name: str) -> Callable[..., Any]:
        plain: Any = getattr(Tensor, name)

        def read(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
            unseen = name not in _NUMBERS or torch._C._dispatch_tls_is_dispatch_key_excluded(
                _PYTHON
            )
            library = name in _ADDRESSES and in_library(sys._getframe(1).f_code.co_filename)
            if threading.get_ident() != own or library or not unseen or not noted:
                return plain(tensor, *args, **kwargs)
            tell, own_tensors = noted[0]
            tensor = own_tensors.get(id(tensor), tensor)
            if name in (_NOT_YET if is_fake(tensor) else _NOT_HERE):
                raise refuse_value(f"Tensor.{name}")
            if is_fake(tensor) or hasattr(type(tensor), "sbp"):
                return plain(tensor, *args, **kwargs)
            tell(tensor, f"Tensor.{name}")
            with torch._C.DisableTorchFunction(), _disable_current_modes():
                return plain(tensor, *args, **kwargs)

        read.__name__ = name  # torch looks methods up by name, and hands this one to modes
        return read

    with ExitStack() as stack:
        for name in (*_MEMORY, *_ADDRESSES, *_NUMBERS):
            stack.enter_context(patch.object(Tensor, name, noting(name)))
        stack.callback(noted.clear)
        del note, stand_ins
        yield


def values_of(tensor: Tensor) -> Exactly | bytes:
    """The values of a tensor, to be compared: as numbers, or many of them as bytes."""
    with torch._C.DisableTorchFunction(), _disable_current_modes():
        if tensor.numel() <= _SHOWN:
            return Exactly(TensorBase.tolist(tensor))
        plain = tensor.detach().resolve_conj().resolve_neg().to("cpu", copy=True)
        return TensorBase.numpy(plain.reshape(-1).view(torch.uint8)).tobytes()
