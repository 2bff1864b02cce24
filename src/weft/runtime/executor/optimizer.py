"""Optimizer updates on local shards, run by torch's own optimizers, or by their fused kernels alone.

Every compute actor that updates parameters gets a copy of the user's optimizer that holds only that actor's shards,
so that one `step()` sees them all together and torch's fused or foreach kernels apply. If a step is one call of a
fused kernel, that is called without the rest of `Optimizer.step`, which outweighs small updates. The only user of
`torch._fused_adam_`, `torch._fused_adamw_`, `torch._fused_sgd_` and of the global hooks of optimizers.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, final

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from weft.capture.optimizer_groups import Optimizers, Optimizing, optimizers_of
from weft.capture.optimizers.attributes import (
    attributes_for_copy,
    attributes_of,
    clones_gradients,
    give_attributes,
    is_foreign,
    kernels_of,
    options_of,
)
from weft.errors import InternalError
from weft.ir.nodes import MASTER
from weft.ir.plan import LocalUpdate
from weft.runtime.memory.state import Variables

# `kernel(live, gradients, overflow)`: one update, given the user's parameter group, a gradient for each
# parameter, and a number (float32, shape []) that is 1 where nothing is to change; None is 0.
Kernel: TypeAlias = Callable[[Mapping[str, Any], list[Tensor], "Tensor | None"], None]


# States that there are by an option only.
_OPTIONAL = {"momentum_buffer": "momentum", "max_exp_avg_sq": "amsgrad"}


@final
class DirectStep:
    """Updates one parameter group of an optimizer by its fused kernel, to the last bit as `step` does."""

    def __init__(self, kernel: Kernel, live: Mapping[str, Any]) -> None:
        self.run = kernel
        self._form = _form(live)

    def suits(self, live: Mapping[str, Any]) -> bool:
        """True if the hyperparameters still are of a form for which `step` calls this kernel and nothing else."""
        return _form(live) == self._form


def direct_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], live: Mapping[str, Any]
) -> DirectStep | None:
    """The function that can stand for `optimizer.step()` on one of its groups, if any.

    Returns:
        None where `step` does more than to call one fused kernel, as to make states.
    """
    make = _MAKERS.get(type(optimizer))
    parameters = group["params"]
    alike = {(parameter.device, parameter.dtype) for parameter in parameters}
    if make is None or not group.get("fused") or len(alike) != 1 or _form(live) is None:
        return None
    states = [optimizer.state[parameter] for parameter in parameters]
    # One that is not wanted now may be there from before.
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


# Entries of a parameter group that the copy decides for itself.
_OWN_ENTRIES = ("params", "fused", "foreach")


# Writes new versions of the targets of updates that run together, given the sources of all in order.
Update: TypeAlias = Callable[[Sequence[Tensor]], None]


def copy_all(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Updates whose new version is the source itself."""
    for target, source in zip(targets, sources, strict=True):
        target.copy_(source)


@final
class OptimizerUpdates:
    """Updates of one optimizer's parameters.

    A parameter with an FP32 main parameter is updated by way of it: the optimizer sees the float32 copy alone.

    Args:
        user: the user's optimizer. Its `param_groups` are read before every step, so schedules
            work; its own parameters and states stay as they are.
        variables: holds the shards. States of a parameter that it holds are used; those that the
            optimizer makes in its first step are added to it.
    """

    def __init__(
        self, user: torch.optim.Optimizer, updates: Sequence[LocalUpdate], variables: Variables
    ) -> None:
        self._user = user
        self._variables = variables
        self._keys = [update.key for update in updates]
        # Other tensor objects on the same memory, so that `.grad` of the user's parameters stays
        # untouched.
        self._shards = [
            variables.get(f"{key}.{MASTER}", variables[key]).detach() for key in self._keys
        ]
        self._foreign = is_foreign(user)
        self._memory = self._shards
        if self._foreign:
            # Its step may ask whether they are parameters that train.
            self._shards = [torch.nn.Parameter(shard) for shard in self._shards]
        # Parameters and the FP32 main parameters that they are rounded from.
        self._rounded = [
            (variables[key].detach(), shard.detach())
            for key, shard in zip(self._keys, self._shards, strict=True)
            if f"{key}.{MASTER}" in variables
        ]
        self._indices = sorted({update.group for update in updates})
        # A copy without parameters, states and hooks; `copy.copy` would lose the attributes of a subclass.
        bare: Any = object.__new__(type(user))
        bare.__dict__.update(user.__dict__)
        bare.__dict__.pop("step", None)
        bare.param_groups = []
        bare.state = defaultdict(dict)
        for name, value in user.__dict__.items():
            if name.endswith("_hooks") and isinstance(value, OrderedDict):
                setattr(bare, name, OrderedDict())
        self._optimizer: torch.optim.Optimizer = bare
        for index in self._indices:
            pairs = zip(updates, self._shards, strict=True)
            shards = [shard for update, shard in pairs if update.group == index]
            self._optimizer.param_groups.append(_local_group(user.param_groups[index], shards))
        lists = any(group.get("foreach") for group in self._optimizer.param_groups)
        self._clones = clones_gradients(user, lists)
        # For what the optimizer keeps, the version that is taken over.
        self._version = -1
        self._complete = False
        # For each group, the places of its shards; and, after the first step, what updates it.
        self._places = [
            [place for place, update in enumerate(updates) if update.group == index]
            for index in self._indices
        ]
        self._direct: list[DirectStep] = []

    def run(self, sources: Sequence[Tensor]) -> None:
        if self._version != self._variables.kept.version:
            self._adopt()
        gradients = self._gradients(sources)
        if not self._run_directly(gradients):
            self._step(gradients)
            self._round()
            if self._foreign or not self._complete:
                # States that the optimizer has created, or put in the place of another tensor.
                for key, shard in zip(self._keys, self._shards, strict=True):
                    if not self._variables.keeps(key, self._optimizer.state[shard]):
                        self._variables.keep(key, self._optimizer.state[shard])
        self._user._opt_called = True  # type: ignore[attr-defined]  # what schedulers look at before they warn

    def run_unless(self, overflow: Tensor, sources: Sequence[Tensor]) -> None:
        """Run where `overflow`, 0 or 1, is 0; the host reads it only where no kernel does.

        Before the first update there are no states yet, and a skipped one must make none.
        """
        if self._version != self._variables.kept.version:
            self._adopt()
        on_device = self._direct and self._run_directly(self._gradients(sources), overflow)
        if not on_device and not overflow.item():
            self.run(sources)

    def _gradients(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """With the strides of shards, as autograd would leave them: fused kernels do not look at strides."""
        return [
            torch.empty_like(shard).copy_(gradient)
            if self._clones or gradient.stride() != shard.stride()
            else gradient
            for shard, gradient in zip(self._shards, sources, strict=True)
        ]

    def _run_directly(self, gradients: list[Tensor], overflow: Tensor | None = None) -> bool:
        """Update by the kernels alone, if that can stand for a step; not where `overflow` is 1."""
        groups = [self._user.param_groups[index] for index in self._indices]
        suits = map(DirectStep.suits, self._direct, groups)
        if not self._direct or not all(suits):
            return False
        for step, live, places in zip(self._direct, groups, self._places, strict=True):
            step.run(live, [gradients[place] for place in places], overflow)
        self._round()
        return True

    def _round(self) -> None:
        for parameter, master in self._rounded:
            parameter.copy_(master)

    def _step(self, gradients: list[Tensor]) -> None:
        for index, group in zip(self._indices, self._optimizer.param_groups, strict=True):
            live = self._user.param_groups[index]
            given = options_of(live) if self._foreign else live
            group.update({key: given[key] for key in given if key not in _OWN_ENTRIES})
        if self._foreign:
            self._take_attributes()
        for shard, gradient in zip(self._shards, gradients, strict=True):
            shard.grad = gradient
        # torch's fused SGD takes momenta of all parameters or of none: not where some were frozen.
        groups = self._optimizer.param_groups
        states = self._optimizer.state
        unlike = [
            group
            for group in groups
            if group.get("fused")
            and len({states.get(x, {}).get("momentum_buffer") is None for x in group["params"]}) > 1
        ]
        for group in unlike:
            group["fused"] = False
        self._optimizer.step()
        for group in unlike:
            group["fused"] = True
        for shard, memory in zip(self._shards, self._memory, strict=True):
            shard.grad = None
            if (
                shard.data_ptr() != memory.data_ptr()
            ):  # it was given other data, as `p.data = …` does
                memory.copy_(shard.detach())
                shard.data = memory

    def _take_attributes(self) -> None:
        """Let the copy, and what stands for the user's parameters, have the attributes that these have now."""
        mine, given = vars(self._optimizer), attributes_for_copy(self._user)
        for name in attributes_for_copy(self._optimizer).keys() - given.keys():
            del mine[name]
        mine.update(given)
        for key, shard in zip(self._keys, self._shards, strict=True):
            if key in self._variables.parameters:
                give_attributes(shard, attributes_of(self._variables.parameters[key]))

    def _adopt(self) -> None:
        """Take over what is kept for the parameters now, be it of the user, or made by an executor of another plan."""
        kept = self._variables.kept
        pairs = zip(self._keys, self._shards, strict=True)
        if self._complete and all(
            self._optimizer.state[shard] is kept.entries.get(key) for key, shard in pairs
        ):
            self._version = kept.version
            return
        self._optimizer.state.clear()
        for key, shard in zip(self._keys, self._shards, strict=True):
            if key in kept.entries:
                self._optimizer.state[shard] = kept.entries[key]
        self._complete = all(key in kept.entries for key in self._keys)
        self._direct = self._direct_steps() if self._complete else []
        self._version = kept.version

    def _direct_steps(self) -> list[DirectStep]:
        """The functions that can stand for a step, one for each group; empty when not every group has one."""
        pairs = zip(self._optimizer.param_groups, self._indices, strict=True)
        steps = [
            direct_step(self._optimizer, group, self._user.param_groups[index])
            for group, index in pairs
        ]
        found = [step for step in steps if step is not None]
        return found if len(found) == len(steps) else []


def group_updates(
    updates: Sequence[LocalUpdate],
    variables: Variables,
    optimizer: Optimizing,
    held: Callable[[], bool] = lambda: False,
) -> list[tuple[list[str], Update]]:
    """Join the updates of one actor by optimizer, and by what says that they are left out."""
    optimizers = optimizers_of(optimizer)
    kinds: dict[object, list[LocalUpdate]] = {}
    for update in updates:
        by = optimizers.place(update.group)[0] if optimizers and update.rule != "copy" else None
        kinds.setdefault((update.rule, by, update.skip), []).append(update)
    return [_joined(members, variables, optimizers, held) for members in kinds.values()]


def _joined(
    members: Sequence[LocalUpdate],
    variables: Variables,
    optimizers: Optimizers,
    held: Callable[[], bool],
) -> tuple[list[str], Update]:
    rule, skip = members[0].rule, members[0].skip
    sources = [update.source for update in members]
    if rule == "copy":
        targets = [variables[update.key].detach() for update in members]
        return sources, lambda given: copy_all(targets, given)
    optimizer = optimizers.place(members[0].group)[0] if optimizers else None
    if type(optimizer).__name__ != rule or optimizer is None:
        raise InternalError(f"the plan updates by {rule}, but the optimizer is {optimizer!r}")
    own = [replace(update, group=optimizers.place(update.group)[1]) for update in members]
    updates = OptimizerUpdates(optimizer, own, variables)
    if (
        skip is not None
    ):  # left out where the last source is 1; a step that may be skipped is never held
        return [*sources, skip], lambda given: updates.run_unless(given[-1], given[:-1])
    # For the gradients of steps that are held, by parameter; of all plans together.
    sums = variables.gradients

    def run_or_hold(given: Sequence[Tensor]) -> None:
        if not held():
            updates.run(given)
            return
        for update, source in zip(members, given, strict=True):
            if update.key in sums:
                sums[update.key].add_(source)
            else:
                sums[update.key] = source.clone()

    return sources, run_or_hold


def _local_group(live: dict[str, Any], shards: Sequence[Tensor]) -> dict[str, Any]:
    """A parameter group with local shards, which runs by the kernels that the plan counts on."""
    group = {**live, "params": list(shards)}
    device_type = shards[0].device.type if shards else "cpu"
    kernels = kernels_of(live, device_type, {shard.dtype for shard in shards})
    if kernels == "fused" and not all(shard.is_contiguous() for shard in shards):
        kernels = "loop"
    ways = {"fused": kernels == "fused", "foreach": kernels == "lists"}
    group.update({name: on for name, on in ways.items() if name in live})
    return group
