"""The options, attributes and kernels of copies of the user's optimizer, and checks that it can be copied.

A rank updates its shards with copies of the user's optimizer, each with some of the parameters, for each plan. Each
copy has its own containers, because a step may write to them.

torch has three implementations for most optimizers: a fused kernel, which needs no extra memory;
"foreach", with temporaries for all parameters at once; a loop, with temporaries for one parameter at a time. On a CPU
"foreach" is no faster than the loop and gives the same numbers, so weft uses the loop there even if the user asks
for "foreach".
"""

from __future__ import annotations

import copy
import traceback
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from inspect import Parameter, signature
from numbers import Real
from types import MethodType
from typing import Any, Literal, TypeAlias

import torch
from torch.utils._foreach_utils import _get_fused_kernels_supported_devices

from weft.capture.fx.refusals import source_line
from weft.capture.optimizer_groups import Optimizers
from weft.capture.python.hooks import named_hook
from weft.capture.python.reachable import OF_GLOBAL
from weft.errors import CaptureError, UserError
from weft.files import in_library

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
    """True if the class of an optimizer is none of torch's, of which it is known what their steps look at."""
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


def unshared_copy(value: Any, tensors: bool = False) -> Any:
    """A value that shares no container with the given one, nor tensors if these are named; all else is the same."""
    match value:
        case dict():
            by_key = copy.copy(value)
            by_key.update({key: unshared_copy(x, tensors) for key, x in value.items()})
            return by_key
        case set():
            return copy.copy(value)
        case list() | deque():
            items = copy.copy(value)
            items.clear()
            items.extend(unshared_copy(x, tensors) for x in value)
            return items
        case torch.Tensor() if tensors:
            return value.detach().clone()
    return value


def options_of(group: Mapping[str, Any], tensors: bool = False) -> dict[str, Any]:
    """The options of a parameter group for a copy of an optimizer, which may write to them (see `unshared_copy`)."""
    return {
        name: unshared_copy(value, tensors) for name, value in group.items() if name != "params"
    }


def attributes_for_copy(optimizer: object, tensors: bool = False) -> dict[str, Any]:
    """The attributes of the user's optimizer for a copy, without parameters, states and hooks (see `unshared_copy`)."""
    return {
        name: unshared_copy(value, tensors)
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
    # On CPUs fused kernels take 16-bit parameters, too, but round differently from loops, and that of SGD leaves whole
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
    """True if an optimizer needs gradients of its own, since it may overwrite them: ops on lists, foreign ones."""
    return lists or is_foreign(optimizer)


# Check that an optimizer can run in a compiled step: it looks at one parameter, calls no hooks and wraps no other.
#
# And what its hyperparameters must be.


# By words of an error of an optimizer's step on a parameter without data: what it does, and what would do.
_WHY = {
    "branches on the value": "branches on the value of a tensor, of which there is none while the step is captured: "
    "choose by torch.where, torch.maximum or clamp, or set the option of the optimizer that does without, as "
    "scale_parameter=False of transformers.Adafactor",
    "Cannot copy out of meta": "writes values of the parameter into a tensor that it has made elsewhere: make that on "
    "the parameter's device, torch.ones((), device=param.device)",
    "on device meta is not on": "makes a tensor on another device than the parameter: make it on that, "
    "torch.zeros(n, device=p.device)",
    "does not support dense gradients": "needs sparse gradients, but the gradients of a plan are dense: use an "
    "optimizer for dense gradients, such as Adam, and nn.Embedding without sparse=True",
}


def check_hyperparameters(optimizers: Optimizers) -> None:
    """Check that what torch's optimizers take as numbers are numbers, or tensors of one element.

    Raises:
        UserError: naming the group and the entry.
    """
    for label, number, group in optimizers.groups():
        optimizer, _ = optimizers.place(number)
        usual = {} if is_foreign(optimizer) else optimizer.defaults
        for key, value in usual.items():
            if key in group and not _is_like(group[key], value):
                takes = "a number" if isinstance(value, Real) else f"numbers, like {value}"
                raise UserError(f"{label}: {key!r} is {group[key]!r}, but must be {takes}")


def _is_like(value: Any, usual: Any) -> bool:
    """True if an option may be given in place of `usual`; an option that is not a number may be anything."""
    if isinstance(usual, tuple | list):
        return (
            isinstance(value, tuple | list)
            and len(value) == len(usual)
            and all(map(_is_like, value, usual))
        )
    if isinstance(usual, bool) or not isinstance(usual, Real):
        return True
    one = isinstance(value, torch.Tensor) and value.numel() == 1
    return one or isinstance(value, Real)


def check_optimizer(optimizer: torch.optim.Optimizer) -> None:
    """Check that a step of the optimizer only updates its parameters, one at a time.

    Raises:
        CaptureError: naming the hook, the optimizer inside, or that parameters depend on each other.
    """
    closure = signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is Parameter.empty:
        raise CaptureError(
            f"the optimizer {type(optimizer).__name__} cannot be captured: its step calls a closure. Compile the step "
            "with another optimizer of the same parameters, such as torch.optim.SGD, which need never update; make "
            f"{type(optimizer).__name__} after weft.compile, and call optimizer.step(closure) with a closure that "
            "calls optimizer.zero_grad() and returns program.step(batch, update=False)"
        )
    # Private API: where `register_step_pre_hook` keeps hooks.
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", None)
    if hooks:
        raise CaptureError(
            f"{type(optimizer).__name__} has {named_hook(hooks)} by register_step_pre_hook, which a compiled step "
            "cannot call, as the update is part of its plan; remove the hook. Gradients are clipped by "
            "clip_norm= of the strategy, and changed by parameter.register_hook; a hook by register_step_post_hook is "
            "called"
        )
    for key in optimizer.state:
        if not isinstance(key, torch.Tensor):
            raise of_no_parameter(optimizer, key)
    ids = {id(each) for group in optimizer.param_groups for each in group["params"]}
    held = {
        key: x
        for key, x in vars(optimizer).items()
        if key not in ("param_groups", "state", "defaults")
    }
    for name, part in ((name, part) for name, value in held.items() for part in _parts(value)):
        kind = _shared_attribute(optimizer, part, ids)
        if kind:
            raise CaptureError(
                f"the optimizer {type(optimizer).__name__} cannot be captured: it holds {kind} in its attribute "
                f"{name!r}, and weft captures its step for one parameter at a time; expected an optimizer "
                "that updates what is in its param_groups, from param.grad, self.state[param], the options of a "
                "group and attributes of the parameter"
            )


def of_no_parameter(optimizer: object, key: object) -> CaptureError:
    """The error for a state under a key that is not a parameter."""
    return CaptureError(
        f"the optimizer {type(optimizer).__name__} cannot be captured: it keeps self.state[{key!r}], which "
        "belongs to no parameter; each rank would have its own copy, and the copies would differ. Keep it for each "
        "parameter, in self.state[param]"
    )


def _shared_attribute(optimizer: object, part: Any, ids: Collection[int]) -> str:
    """The name of what an optimizer holds that copies of it with other parameters cannot use; "" if they can."""
    owner = part.__self__ if isinstance(part, MethodType) else part
    if owner is optimizer:  # schedulers put a step of their own on it
        return ""
    if isinstance(owner, torch.nn.Module) and any(True for _ in owner.parameters()):
        return "a model"
    if isinstance(part, torch.nn.Parameter) or id(part) in ids:
        return "parameters"
    if isinstance(part, int) and part in ids:
        return "the id of a parameter"
    return "another optimizer" if isinstance(owner, torch.optim.Optimizer) else ""


def _parts(value: Any, depth: int = 3) -> Iterator[Any]:
    yield value
    if isinstance(value, dict):
        value = [*value, *value.values()]
    if depth and isinstance(value, list | tuple | set | frozenset | deque):
        for each in value:
            yield from _parts(each, depth - 1)


def refuse_step(optimizer: object, name: str, error: Exception) -> CaptureError:
    """The error to raise where the step of an optimizer on a parameter without data has failed, with its line."""
    text = f"{type(error).__name__}: {error}"
    failed = f"failed with {text}; expected an update of plain tensor code"
    why = next((why for words, why in _WHY.items() if words in text), failed)
    frames = [each for each in traceback.extract_tb(error.__traceback__) if not in_library(each[0])]
    where = source_line(frames[-1].filename, frames[-1].lineno or 0) if frames else ""
    return CaptureError(
        f"{where}the optimizer {type(optimizer).__name__} cannot be captured: its step on {name!r} {why}"
    )
