"""Optimizer updates on local shards, run by torch's own optimizers.

Every compute actor that updates parameters gets a copy of the user's optimizer that holds only that
actor's shards, so that one `step()` sees them all together and torch's fused or foreach kernels
apply.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, final

import torch
from torch import Tensor

from weft.capture.optimizers.given import (
    attributes_for_copy,
    attributes_of,
    give_attributes,
    is_foreign,
    options_of,
)
from weft.capture.optimizers.groups import Optimizers, Optimizing, optimizers_of
from weft.capture.optimizers.kernels import clones_gradients, kernels_of
from weft.errors import InternalError
from weft.ir.nodes import MASTER
from weft.ir.plan import LocalUpdate
from weft.runtime.executor.direct_updates import DirectStep, direct_step
from weft.runtime.memory.state import Variables

# Entries of a parameter group that the copy decides for itself.
_OWN_ENTRIES = ("params", "fused", "foreach")


class Updates(Protocol):
    """Updates that run together."""

    def run(self, sources: Sequence[Tensor]) -> None:
        """Write new versions of the targets, given the sources of all updates in order."""


@final
class CopyUpdates:
    """Updates whose new version is the source itself."""

    def __init__(self, targets: Sequence[Tensor]) -> None:
        self._targets = tuple(targets)

    def run(self, sources: Sequence[Tensor]) -> None:
        for target, source in zip(self._targets, sources, strict=True):
            target.copy_(source)


@final
class OptimizerUpdates:
    """Updates of one optimizer's parameters.

    A parameter with a master is updated by way of it: the optimizer sees the float32 copy alone.

    Args:
        user: the user's optimizer. Its `param_groups` are read before every step, so schedules
            work; its own parameters and states stay as they are.
        updates: what to update; all by `user`'s rule.
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
        self._shards = [_updated(variables, key) for key in self._keys]
        self._foreign = is_foreign(user)
        self._memory = self._shards
        if self._foreign:
            # Its step may ask whether they are parameters that train.
            self._shards = [torch.nn.Parameter(shard) for shard in self._shards]
        # Parameters and the masters that they are rounded from.
        self._rounded = [
            (variables[key].detach(), shard.detach())
            for key, shard in zip(self._keys, self._shards, strict=True)
            if f"{key}.{MASTER}" in variables
        ]
        self._indices = sorted({update.group for update in updates})
        self._optimizer = _bare_copy(user)
        for index in self._indices:
            pairs = zip(updates, self._shards, strict=True)
            shards = [shard for update, shard in pairs if update.group == index]
            self._optimizer.param_groups.append(_local_group(user.param_groups[index], shards))
        lists = any(group.get("foreach") for group in self._optimizer.param_groups)
        self._clones = clones_gradients(user, lists)
        # Of what the optimizer keeps, the version that is taken over.
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
                self._keep_new()
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
        return [
            _own_gradient(gradient, shard, self._clones)
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
        """Let the parameters that have masters be these, rounded."""
        for parameter, master in self._rounded:
            parameter.copy_(master)

    def _step(self, gradients: list[Tensor]) -> None:
        """A step of the optimizer itself."""
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
        unlike = [
            group for group in groups if group.get("fused") and self._some_have_momenta(group)
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

    def _some_have_momenta(self, group: dict[str, Any]) -> bool:
        """True where some parameters of a group have a momentum already, and others not yet."""
        states = (self._optimizer.state.get(shard, {}) for shard in group["params"])
        return len({state.get("momentum_buffer") is None for state in states}) > 1

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

    def _keep_new(self) -> None:
        """Show what the optimizer has made anew, or put in the place of another tensor, as users know it."""
        for key, shard in zip(self._keys, self._shards, strict=True):
            if not self._variables.keeps(key, self._optimizer.state[shard]):
                self._variables.keep(key, self._optimizer.state[shard])

    def _direct_steps(self) -> list[DirectStep]:
        """The functions that can stand for a step, one for each group; empty when not every group has one."""
        pairs = zip(self._optimizer.param_groups, self._indices, strict=True)
        steps = [
            direct_step(self._optimizer, group, self._user.param_groups[index])
            for group, index in pairs
        ]
        found = [step for step in steps if step is not None]
        return found if len(found) == len(steps) else []


@final
class SkippedUpdates:
    """Updates that are left out when the last source, 0 or 1, is 1."""

    def __init__(self, updates: OptimizerUpdates) -> None:
        self._updates = updates

    def run(self, sources: Sequence[Tensor]) -> None:
        *gradients, overflow = sources
        self._updates.run_unless(overflow, gradients)


@final
class HeldUpdates:
    """Updates that a held step leaves out: their sources are added to the sums of its rank."""

    def __init__(
        self,
        updates: Updates,
        keys: Sequence[str],
        sums: dict[str, Tensor],
        held: Callable[[], bool],
    ) -> None:
        self._updates = updates
        self._keys = tuple(keys)
        # By parameter; of all plans together.
        self._sums = sums
        self._held = held

    def run(self, sources: Sequence[Tensor]) -> None:
        if not self._held():
            self._updates.run(sources)
            return
        for key, source in zip(self._keys, sources, strict=True):
            if key in self._sums:
                self._sums[key].add_(source)
            else:
                self._sums[key] = source.clone()


def group_updates(
    updates: Sequence[LocalUpdate],
    variables: Variables,
    optimizer: Optimizing,
    held: Callable[[], bool] = lambda: False,
) -> list[tuple[list[str], Updates]]:
    """Join the updates of one actor by optimizer, and by what says that they are left out.

    Args:
        optimizer: the user's, one or several.
        held: true where the running step only adds its gradients to the sums.

    Returns:
        For each join, the names of the sources and what runs them.

    Raises:
        InternalError: when the plan needs an optimizer of another class than the one given.
    """
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
) -> tuple[list[str], Updates]:
    """Updates of one optimizer and one `skip`: the names of their sources, and what runs them."""
    rule, skip = members[0].rule, members[0].skip
    sources = [update.source for update in members]
    if rule == "copy":
        return sources, CopyUpdates([variables[update.key].detach() for update in members])
    optimizer = optimizers.place(members[0].group)[0] if optimizers else None
    if type(optimizer).__name__ != rule or optimizer is None:
        raise InternalError(f"the plan updates by {rule}, but the optimizer is {optimizer!r}")
    own = [replace(update, group=optimizers.place(update.group)[1]) for update in members]
    updates = OptimizerUpdates(optimizer, own, variables)
    if skip is not None:  # a step that may be skipped is never held
        return [*sources, skip], SkippedUpdates(updates)
    keys = [update.key for update in members]
    return sources, HeldUpdates(updates, keys, variables.gradients, held)


def _bare_copy(user: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """A copy without parameters, states, hooks and what learning-rate schedulers patch.

    `copy.copy` would keep only what optimizers pickle, and lose the attributes of a subclass.
    """
    bare: Any = object.__new__(type(user))
    bare.__dict__.update(user.__dict__)
    bare.__dict__.pop("step", None)
    bare.param_groups = []
    bare.state = defaultdict(dict)
    for name, value in user.__dict__.items():
        if name.endswith("_hooks") and isinstance(value, OrderedDict):
            setattr(bare, name, OrderedDict())
    copy: torch.optim.Optimizer = bare
    return copy


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


def _updated(variables: Variables, key: str) -> Tensor:
    """The tensor that an optimizer updates for a parameter: its master, or itself."""
    return variables.get(f"{key}.{MASTER}", variables[key]).detach()


def _own_gradient(gradient: Tensor, shard: Tensor, clone: bool) -> Tensor:
    """The gradient with the shard's strides, as autograd would leave it: fused kernels do not look at strides."""
    if clone or gradient.stride() != shard.stride():
        return torch.empty_like(shard).copy_(gradient)
    return gradient
