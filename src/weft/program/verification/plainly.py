"""The live tensors of a model as ordinary ones, for the time of a plain step."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.capture.optimizers.given import attributes_of
from weft.program.live.laid import exchange, whole_of


def wholes(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Plain copies of tensors; collective."""
    return {key: whole_of(tensor) for key, tensor in tensors.items()}


@contextmanager
def plainly(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> Iterator[None]:
    """While this lasts, tensors have other values, and are ordinary ones.

    They are the same objects: whoever holds them, a closure, a list or an optimizer, computes with
    the values. Hooks of users stay on them.

    Args:
        tensors: parameters and buffers, by key; live.
        values: whole; written to where a step writes.
    """
    lent: list[_Lent] = []
    try:
        for key, own in tensors.items():
            lent.append(_Lent(own, values[key]))
        yield
    finally:
        for each in reversed(lent):
            each.give_back()


@final
class _Lent:
    """A tensor object that has another content until it is given back."""

    def __init__(self, own: Tensor, value: Tensor) -> None:
        content = value.detach()
        if isinstance(own, nn.Parameter):
            content = nn.Parameter(content, own.requires_grad)
        hooks = own._backward_hooks or {}
        theirs = attributes_of(own)
        self._own, self._content, self._hooks = own, content, own._backward_hooks
        exchange(own, content)
        vars(own).update(theirs)
        users = {key: hook for key, hook in hooks.items() if not hasattr(hook, "lays_gradient")}
        if users:
            own._backward_hooks = OrderedDict(users)

    def give_back(self) -> None:
        exchange(self._own, self._content)
        if self._hooks is not None:
            self._own._backward_hooks = self._hooks


@contextmanager
def states_lent(
    optimizer: torch.optim.Optimizer, states: Mapping[Tensor, Mapping[str, Any]]
) -> Iterator[None]:
    """While this lasts, an optimizer keeps other states; afterwards all of it is as it was."""
    own, groups = dict(vars(optimizer)), [dict(group) for group in optimizer.param_groups]
    optimizer.state = defaultdict(dict, {key: dict(value) for key, value in states.items()})
    try:
        yield
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(own)
        for group, before in zip(optimizer.param_groups, groups, strict=True):
            group.clear()
            group.update(before)
