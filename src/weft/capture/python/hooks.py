"""Hooks: those on parameters that can be in the graph are traced, others are refused; all are compared later.

Private API: `Tensor._backward_hooks` and `Tensor._post_accumulate_grad_hooks`, which hold what was
registered, the dicts of modules and optimizers, and `RemovableHandle.next_id`, the number of the next hook.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from weft.capture.optimizer_groups import Optimizers
from weft.capture.python.reachable import MODULE_HOOKS
from weft.errors import CaptureError

Hook: TypeAlias = Callable[[torch.Tensor], Any]
_HOOKS = (
    *MODULE_HOOKS,
    "_optimizer_step_pre_hooks",  # those after a step are called as they are then
)
_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)
_OF_TENSORS = ("_backward_hooks", "_post_accumulate_grad_hooks")


def gradient_hooks(parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[Hook, ...]]:
    """The hooks that `register_hook` put on each parameter, in order.

    Raises:
        CaptureError: for a hook of `register_post_accumulate_grad_hook`.
    """
    for name, parameter in parameters.items():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if after:
            raise CaptureError(
                f"the parameter {name} has {named_hook(after)} by register_post_accumulate_grad_hook, which a "
                "compiled step cannot call: it has no parameter.grad to show. Remove the hook; register_hook, which "
                "is given the gradient and returns another, is captured, and clip_norm= of the strategy clips"
            )
    return {name: _of_users(one._backward_hooks) for name, one in parameters.items()}


def named_hook(hooks: Any) -> str:
    """The first of some hooks, and its place."""
    hook = next(iter(hooks.values()))
    code = getattr(inspect.unwrap(hook), "__code__", None) if callable(hook) else None
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"the hook {name}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")


@final
class Hooks:
    """The hooks of modules, parameters and optimizers, to be compared before every step."""

    def __init__(self, model: nn.Module, optimizers: Optimizers) -> None:
        self._parameters = dict(model.named_parameters())
        self._dicts = list(_dicts(model, optimizers))
        self._note()
        self._then = self._now()

    def changed(self) -> str | None:
        """The hooks that are not as they were, in words; some microseconds."""
        # Keys of hooks only grow: where none was registered since, anywhere, hooks have the keys that they had.
        registered = RemovableHandle.next_id
        if registered == self._registered and list(chain.from_iterable(self._held)) == self._keys:
            return None
        now = self._now()
        for name, before in self._then.items():
            if now[name] != before:
                return (
                    f"the number of hooks of {name} was {len(before)} and is {len(now[name])}"
                    if name
                    else "the hooks of modules and optimizers were others"
                )
        self._note()
        return None

    def _now(self) -> dict[str, Any]:
        """By the name of a parameter its hooks; by "" those of all others, each by its key."""
        found: dict[str, Any] = {"": list(map(list, self._dicts))}
        for name, parameter in self._parameters.items():
            hooks = [getattr(parameter, key) for key in _OF_TENSORS]
            found[name] = tuple(each for held in hooks for each in _of_users(held))
        return found

    def _note(self) -> None:
        """Note the dicts that hold hooks now, and the keys of all hooks in order."""
        tensors = (getattr(x, key) for x in self._parameters.values() for key in _OF_TENSORS)
        self._held = [hooks for hooks in (*self._dicts, *tensors) if hooks]
        self._keys = list(chain.from_iterable(self._held))
        self._registered = RemovableHandle.next_id


def _dicts(model: nn.Module, optimizers: Optimizers) -> Iterator[dict[Any, Any]]:
    """The dicts that hold the hooks of modules and optimizers, and of all modules."""
    yield from (getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS)
    for owner in (*model.modules(), *optimizers.each):
        for name in _HOOKS:
            hooks = vars(owner).get(name)
            if isinstance(hooks, dict):
                yield hooks


def _of_users(hooks: Any) -> tuple[Hook, ...]:
    """The hooks of a dict that are not weft's own."""
    return tuple(hook for hook in (hooks or {}).values() if not hasattr(hook, "lays_gradient"))
