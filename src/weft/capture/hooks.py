"""Hooks on parameters: those that can stand in the graph are traced, others are refused.

Private API: `Tensor._backward_hooks` and `Tensor._post_accumulate_grad_hooks`, which hold what was
registered.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import torch

from weft.errors import CaptureError

Hook: TypeAlias = Callable[[torch.Tensor], Any]


def gradient_hooks(parameters: Mapping[str, torch.Tensor]) -> dict[str, tuple[Hook, ...]]:
    """What `register_hook` put on each parameter, in order.

    Raises:
        CaptureError: for a hook of `register_post_accumulate_grad_hook`.
    """
    for name, parameter in parameters.items():
        after = getattr(parameter, "_post_accumulate_grad_hooks", None)
        if after:
            raise CaptureError(
                f"the parameter {name} has {named_hook(after)} by register_post_accumulate_grad_hook, which a "
                "compiled step cannot call: it has no parameter.grad to show. Take it away; register_hook, which "
                "is given the gradient and returns another, is captured, and clip_norm= of the strategy clips"
            )
    return {
        name: tuple(
            h for h in (one._backward_hooks or {}).values() if not hasattr(h, "lays_gradient")
        )
        for name, one in parameters.items()
    }


def named_hook(hooks: Any) -> str:
    """The first of some hooks, and its place."""
    hook = next(iter(hooks.values()))
    code = getattr(inspect.unwrap(hook), "__code__", None) if callable(hook) else None
    name = getattr(hook, "__qualname__", type(hook).__name__)
    return f"the hook {name}" + (f" ({code.co_filename}:{code.co_firstlineno})" if code else "")
