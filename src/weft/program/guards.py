"""What a step was captured with and the user may change between steps: compared before every step, planned anew."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter, is_
from typing import Any

from torch import nn

from weft.capture.hooks import Hooked
from weft.capture.optimizers import Optimizers
from weft.capture.watch import Watch

_HOOKS = (
    *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks"),
    *("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
)
_requires_grad = attrgetter("requires_grad")


class Guards:
    """Values of Python that the trace read, which parameters are trained, and what the optimizers hold."""

    def __init__(self, watch: Watch, model: nn.Module, optimizers: Optimizers) -> None:
        self._watch = watch
        named = dict(model.named_parameters()) if optimizers else {}
        self._names, self._parameters = tuple(named), tuple(named.values())
        self._trained = list(map(_requires_grad, self._parameters))
        self._optimizers = optimizers
        self._hooks = list(_hooks(model, optimizers))
        self._hooked = list(map(len, self._hooks))
        self._parameter_hooks = Hooked(named)
        self._members = self._grouped()

    def changed(self) -> str | None:
        """What is not as it was, from what and to what, in words; some microseconds."""
        entry = self._watch.changed()
        if entry is not None:
            return _words(entry.text, entry.then, entry.now)
        if list(map(_requires_grad, self._parameters)) != self._trained:
            return self._flag()
        hooked = list(map(len, self._hooks))
        if hooked != self._hooked:
            return _words(
                "the number of hooks of modules and optimizers", sum(self._hooked), sum(hooked)
            )
        other = self._parameter_hooks.changed()
        if other is not None:
            return _words(f"the number of hooks of {other[0]}", *other[1:])
        members = self._grouped()
        if len(members) != len(self._members) or not all(map(is_, members, self._members)):
            return "the parameters in the optimizer's groups were others"
        return None

    def _grouped(self) -> list[Any]:
        """The parameters of all groups, with the lists' own borders."""
        found: list[Any] = []
        for one in self._optimizers.each:
            for group in one.param_groups:
                found += [*group["params"], None]
        return found

    def _flag(self) -> str | None:
        for name, parameter, before in zip(
            self._names, self._parameters, self._trained, strict=True
        ):
            if parameter.requires_grad != before:
                return _words(f"{name}.requires_grad", before, parameter.requires_grad)
        return None


def _hooks(model: nn.Module, optimizers: Optimizers) -> Iterator[dict[Any, Any]]:
    """The dicts that hold the hooks of modules and optimizers (private attributes of theirs)."""
    for owner in (*model.modules(), *optimizers.each):
        for name in _HOOKS:
            hooks = vars(owner).get(name)
            if isinstance(hooks, dict):
                yield hooks


def _words(what: str, before: object, now: object) -> str:
    return f"{what} was {before} and is {now}"
