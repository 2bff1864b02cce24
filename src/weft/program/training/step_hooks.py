"""Hooks that users put behind an optimizer's step: called when a program has updated, on the live model.

Private API: `_optimizer_step_post_hooks`, where `register_step_post_hook` keeps them, and the arguments that torch's
wrapper of `step` calls them with.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch

from weft.capture.optimizer_groups import Optimizers
from weft.capture.optimizers.counters import counters_of
from weft.errors import UserError
from weft.ir import LogicalGraph
from weft.ir.logical import Update

_HOOKS = "_optimizer_step_post_hooks"
_Grad: Any = torch.Tensor.grad


def check_step_hooks(optimizers: Optimizers, graph: LogicalGraph) -> None:
    """Check that no step leaves its updates out where hooks behind it, or counters, would go on all the same.

    Raises:
        UserError: a step may, as with a scaled loss: only the ranks know when.
    """
    if not any(each.skip for each in graph.of_kind(Update)):
        return
    for each in optimizers.each:
        counters = sorted(map(str, counters_of(each)))
        if counters:
            raise UserError(
                f'{type(each).__name__} counts its steps ({counters[0]}), and a scaled loss (precision "fp16"): a step '
                "that overflows makes no update, and would be counted all the same. Count in self.state[param], or use "
                "bf16"
            )
    if any(map(_hooks, optimizers.each)):
        raise UserError(
            'a hook by register_step_post_hook and a scaled loss (precision "fp16"): a step that overflows makes no '
            "update, and the hook would be called all the same. Take the hook away, and do between steps what it does, "
            "or use bf16"
        )


def call_step_hooks(optimizers: Optimizers) -> None:
    """Call the hooks behind the steps of the optimizers, each with the user's optimizer, whose tensors are live.

    Raises:
        UserError: one reads a gradient, which an update has used.
    """
    for each in optimizers.each:
        hooks = _hooks(each)
        if hooks:
            with _used_gradients_refused(each):
                for hook in hooks:
                    hook(each, (each,), {})


@contextmanager
def without_step_hooks(optimizers: Optimizers) -> Iterator[None]:
    """While this lasts, there are no hooks behind the steps of the optimizers."""
    with ExitStack() as stack:
        for each in optimizers.each:
            if _hooks(each):
                stack.enter_context(patch.object(each, _HOOKS, OrderedDict()))
        yield


def _hooks(optimizer: torch.optim.Optimizer) -> list[Any]:
    return list(getattr(optimizer, _HOOKS, {}).values())


@contextmanager
def _used_gradients_refused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Refuse to give a gradient that is None: a hook that leaves out parameters without one would leave out all."""
    own = {id(each) for group in optimizer.param_groups for each in group["params"]}

    def checked(tensor: torch.Tensor) -> Any:
        found = _Grad.__get__(tensor)
        if found is None and id(tensor) in own:
            raise UserError(
                f"a hook by register_step_post_hook of {type(optimizer).__name__} reads parameter.grad, which a step "
                "with an update does not leave. For gradients: program.step(batch, update=False), then read them, then "
                "optimizer.step(), which calls the hook too"
            )
        return found

    with patch.object(torch.Tensor, "grad", property(checked, _Grad.__set__, _Grad.__delete__)):
        yield
