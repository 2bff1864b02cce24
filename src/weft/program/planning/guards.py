"""Guards: facts of the capture that the user may change between steps; compared before every step, planned anew."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain
from operator import attrgetter, is_
from typing import Any, final

import torch
from torch import nn

from weft.capture.capture import Captured
from weft.capture.numbers.changing import can_follow
from weft.capture.optimizers.groups import Optimizers
from weft.capture.python.reached import MODULE_HOOKS
from weft.capture.python.rewriting.hooks import Hooked, registered
from weft.capture.watch import Entry
from weft.program.planning.outside import Outside
from weft.tensor import GlobalTensor

_HOOKS = (
    *MODULE_HOOKS,
    "_optimizer_step_pre_hooks",  # those behind a step are called as they are then
)
_GLOBAL_HOOKS = (
    *("_global_forward_hooks", "_global_forward_pre_hooks"),
    *("_global_backward_hooks", "_global_backward_pre_hooks"),
)
_requires_grad = attrgetter("requires_grad")
_nothing = nullcontext()


@final
class Guards:
    """Values of Python that the trace read, which parameters are trained, and what the optimizers hold.

    Attributes:
        outside: the tensors outside the model that the step reads.
    """

    def __init__(self, captured: Captured, model: nn.Module, optimizers: Optimizers) -> None:
        self._watch = captured.watch
        self.outside = Outside(captured)
        named = dict(model.named_parameters())
        self._names, self._parameters = tuple(named), tuple(named.values())
        self._trained = list(map(_requires_grad, self._parameters))
        self._several = any(isinstance(each, GlobalTensor) for each in self._parameters)
        self._optimizers = optimizers
        hooks = list(_hooks(model, optimizers))
        # Most of them are empty, which is seen at once.
        self._bare = [each for each in hooks if not each]
        self._hooks = [each for each in hooks if each]
        self._hooked = list(map(list, self._hooks))
        self._parameter_hooks = Hooked(named)
        self._registered = registered()
        members = self._grouped()
        self._members, self._sizes = list(chain.from_iterable(members)), list(map(len, members))

    def changed(self) -> str | None:
        """The first guard that has changed, from what and to what, in words; some microseconds."""
        entry = self._watch.changed()
        if entry is not None:
            return _words(entry.text, entry.then, entry.now)
        other = self.outside.changed()
        if other is not None:
            return other
        # Otherwise torch asks the class of each global tensor how it gives its flag.
        with torch._C.DisableTorchFunction() if self._several else _nothing:
            if list(map(_requires_grad, self._parameters)) != self._trained:
                return self._flag()
            other = self._other_hooks()
        if other is not None:
            return other
        members = self._grouped()
        same = map(is_, chain.from_iterable(members), self._members)
        if list(map(len, members)) != self._sizes or not all(same):
            return "the parameters in the optimizer's groups were others"
        return None

    def numbers_changed(self) -> list[Entry]:
        """The numbers that are other ones now, of the same type."""
        found = [each for each in self._watch.entries if can_follow(each)]
        return [e for e in found if not e.holds() and type(e.value_now) is type(e.value)]

    def _other_hooks(self) -> str | None:
        """The hooks that are not as they were, in words."""
        now = registered()
        # Keys of hooks only grow, so that equal ones are the same hooks.
        if list(map(list, self._hooks)) != self._hooked or (
            now != self._registered and any(self._bare)
        ):
            return "the hooks of modules and optimizers were others"
        other = self._parameter_hooks.changed(now != self._registered)
        if other is not None:
            return _words(f"the number of hooks of {other[0]}", *other[1:])
        self._registered = now
        return None

    def _grouped(self) -> list[list[Any]]:
        """The parameters of each group."""
        return [group["params"] for one in self._optimizers.each for group in one.param_groups]

    def _flag(self) -> str | None:
        for name, parameter, before in zip(
            self._names, self._parameters, self._trained, strict=True
        ):
            if parameter.requires_grad != before:
                return _words(f"{name}.requires_grad", before, parameter.requires_grad)
        return None


def _hooks(model: nn.Module, optimizers: Optimizers) -> Iterator[dict[Any, Any]]:
    """The dicts that hold the hooks of modules and optimizers, and of all modules (private attributes of theirs)."""
    yield from (getattr(torch.nn.modules.module, name) for name in _GLOBAL_HOOKS)
    for owner in (*model.modules(), *optimizers.each):
        for name in _HOOKS:
            hooks = vars(owner).get(name)
            if isinstance(hooks, dict):
                yield hooks


def _words(what: str, before: object, now: object) -> str:
    return f"{what} was {before} and is {now}"
