"""The things that a copy of the user's optimizer is given: options, attributes of it and of parameters, its kernels.

A rank updates its parts by copies of the user's optimizer, each with some of the parameters, for each plan. Each copy
has containers of its own: a step may write to them.

torch has three ways for most optimizers: a fused kernel, which takes nothing; ops on lists of tensors
("foreach"), which make further tensors for all parameters at once; a loop, which makes them for one
parameter after the other. On a CPU lists are no faster than the loop, so it is the loop there, also where
the user asks for lists: the numbers are the same.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Collection, Mapping
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from weft.capture.python.reachable import OF_GLOBAL

# Attributes that copies have for themselves, or that torch writes.
_OWN = (
    "param_groups",
    "state",
    "defaults",
    "step",
    "_opt_called",
    "_step_count",
    "_warned_capturable_if_run_uncaptured",
)


def is_foreign(optimizer: object) -> bool:
    """True where the class of an optimizer is none of torch's, of which it is known what their steps look at."""
    return not type(optimizer).__module__.startswith("torch.optim")


def attributes_of(parameter: torch.Tensor) -> dict[str, Any]:
    """The attributes that the user has put on a parameter, by which an update of the user's may go."""
    return {name: value for name, value in vars(parameter).items() if name not in OF_GLOBAL}


def give_attributes(parameter: torch.Tensor, attributes: Mapping[str, Any]) -> None:
    """Let a tensor that stands for a parameter have these attributes and no others."""
    own = vars(parameter)
    if own or attributes:
        own.clear()
        own.update(attributes)


def owned(value: Any, tensors: bool = False) -> Any:
    """A value that shares no container with the given one, nor tensors if these are named; all else is the same."""
    match value:
        case dict():
            by_key = copy.copy(value)
            by_key.update({key: owned(x, tensors) for key, x in value.items()})
            return by_key
        case set():
            return copy.copy(value)
        case list() | deque():
            items = copy.copy(value)
            items.clear()
            items.extend(owned(x, tensors) for x in value)
            return items
        case torch.Tensor() if tensors:
            return value.detach().clone()
    return value


def options_of(group: Mapping[str, Any], tensors: bool = False) -> dict[str, Any]:
    """The options of a parameter group for a copy of an optimizer, which may write to them (see `owned`)."""
    return {name: owned(value, tensors) for name, value in group.items() if name != "params"}


def attributes_for_copy(optimizer: object, tensors: bool = False) -> dict[str, Any]:
    """The attributes of the user's optimizer, but for parameters, states and hooks, for a copy of it (see `owned`)."""
    return {
        name: owned(value, tensors)
        for name, value in vars(optimizer).items()
        if name not in _OWN and not name.endswith("_hooks")
    }


Kernels: TypeAlias = Literal["fused", "lists", "loop"]


def kernels_of(
    options: Mapping[str, Any], device_type: str, dtypes: Collection[torch.dtype]
) -> Kernels:
    """The kernels of a parameter group on a device."""
    if options.get("fused"):
        return "fused"
    fused, lists = options.get("fused"), options.get("foreach")
    differentiable = options.get("differentiable")
    open_choice = "fused" in options and fused is None and lists is not False
    # On CPUs fused kernels take 16-bit parameters, too, but round otherwise than loops, and that of SGD leaves whole
    # vectors of them as they are (seen with torch 2.13).
    fusible = device_type in _get_fused_kernels_supported_devices() and all(
        dtype.is_floating_point and (device_type != "cpu" or dtype.itemsize >= 4)
        for dtype in dtypes
    )
    if open_choice and not differentiable and fusible:
        return "fused"
    if device_type == "cpu" or "foreach" not in options:
        return "loop"
    return "lists" if lists or (lists is None and fused is None and not differentiable) else "loop"


def clones_gradients(optimizer: torch.optim.Optimizer, lists: bool) -> bool:
    """True where an optimizer needs gradients of its own, since it may overwrite them: ops on lists, foreign ones."""
    return lists or is_foreign(optimizer)
