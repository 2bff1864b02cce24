"""torch's fused optimizer kernels without the rest of `Optimizer.step`, which outweighs small updates.

The only user of `torch._fused_adam_`, `torch._fused_adamw_`, `torch._fused_sgd_` and of the global
hooks of optimizers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
)

# `kernel(live, gradients, overflow)`: one update, given the user's parameter group, a gradient for each
# parameter, and a number (float32, shape []) that is 1 where nothing is to change; None is 0.
Kernel: TypeAlias = Callable[[Mapping[str, Any], list[Tensor], "Tensor | None"], None]


# States that there are by an option only.
_OPTIONAL = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad"}


@final
class DirectStep:
    """Updates one parameter group of an optimizer by its fused kernel, to the last bit as `step` does.

    Args:
        kernel: what calls it.
        live: the user's parameter group.
    """

    def __init__(self, kernel: Kernel, live: Mapping[str, Any]) -> None:
        self.run = kernel
        self._form = _form(live)

    def suits(self, live: Mapping[str, Any]) -> bool:
        """True where the hyperparameters still are of a form for which `step` calls this kernel and nothing else."""
        return _form(live) == self._form


def direct_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], live: Mapping[str, Any]
) -> DirectStep | None:
    """The function that can stand for `optimizer.step()` on one of its groups, if any.

    Args:
        optimizer: it has stepped before, so that its states are there.
        group: one of its groups.
        live: the user's parameter group.

    Returns:
        None where `step` does more than to call one fused kernel, as to make states.
    """
    make = _MAKERS.get(type(optimizer))
    parameters = group["params"]
    alike = {(parameter.device, parameter.dtype) for parameter in parameters}
    if make is None or not group.get("fused") or len(alike) != 1 or _form(live) is None:
        return None
    states = [optimizer.state[parameter] for parameter in parameters]
    # One that is not wanted now may stand there from before.
    named = {name: bool(live.get(option)) for name, option in _OPTIONAL.items()}
    if any(wanted and name not in state for name, wanted in named.items() for state in states):
        return None
    unwanted = {name for name, wanted in named.items() if not wanted}
    states = [{k: x for k, x in state.items() if k not in unwanted} for state in states]
    return DirectStep(make(parameters, states), live)


def _form(live: Mapping[str, Any]) -> tuple[object, ...] | None:
    """The form of a group, which decides what states there are; None when tensors or hooks want `step` itself."""
    numbers = (live["lr"], *live.get("betas", ()))
    hooks = (*_global_optimizer_pre_hooks.values(), *_global_optimizer_post_hooks.values())
    if not all(hasattr(hook, "notes_use") for hook in hooks):  # weft's own hook looks on
        return None
    if any(isinstance(number, Tensor) for number in numbers):
        return None
    return live.get("amsgrad"), bool(live.get("momentum"))


def _adam(parameters: list[Tensor], states: Sequence[Mapping[str, Any]]) -> Kernel:
    averages = [state["exp_avg"] for state in states]
    squares = [state["exp_avg_sq"] for state in states]
    largest = [state["max_exp_avg_sq"] for state in states if "max_exp_avg_sq" in state]
    steps = [state["step"] for state in states]

    def run(live: Mapping[str, Any], gradients: list[Tensor], overflow: Tensor | None) -> None:
        torch._foreach_add_(steps, 1)
        fused = torch._fused_adamw_ if live["decoupled_weight_decay"] else torch._fused_adam_
        beta1, beta2 = live["betas"]
        fused(
            parameters,
            gradients,
            averages,
            squares,
            largest,
            steps,
            amsgrad=live["amsgrad"],
            lr=live["lr"],
            beta1=beta1,
            beta2=beta2,
            weight_decay=live["weight_decay"],
            eps=live["eps"],
            maximize=live["maximize"],
            grad_scale=None,
            found_inf=overflow,
        )
        if overflow is not None:
            torch._foreach_sub_(steps, [overflow] * len(steps))

    return run


def _sgd(parameters: list[Tensor], states: Sequence[Mapping[str, Any]]) -> Kernel:
    kept = [state.get("momentum_buffer") for state in states]
    buffers = [buffer for buffer in kept if buffer is not None]

    def run(live: Mapping[str, Any], gradients: list[Tensor], overflow: Tensor | None) -> None:
        torch._fused_sgd_(
            parameters,
            gradients,
            buffers,
            weight_decay=live["weight_decay"],
            momentum=live["momentum"],
            lr=live["lr"],
            dampening=live["dampening"],
            nesterov=live["nesterov"],
            maximize=live["maximize"],
            is_first_step=False,
            grad_scale=None,
            found_inf=overflow,
        )

    return run


_MAKERS: dict[type, Callable[[list[Tensor], Sequence[Mapping[str, Any]]], Kernel]] = {
    torch.optim.Adam: _adam,
    torch.optim.AdamW: _adam,
    torch.optim.SGD: _sgd,
}
