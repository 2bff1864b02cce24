"""Guards: facts of the capture that the user may change between steps; compared before every step, planned anew."""

from __future__ import annotations

from contextlib import nullcontext
from itertools import chain
from operator import attrgetter, is_
from typing import Any, final

import torch
from torch import nn

from weft.capture.capture import Captured
from weft.capture.numbers.symbolic import can_follow
from weft.capture.optimizer_groups import Optimizers
from weft.capture.python.hooks import Hooks
from weft.capture.python_guards import Guard
from weft.program.planning.external_tensors import ExternalTensors
from weft.tensor import GlobalTensor

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
        self.outside = ExternalTensors(captured)
        named = dict(model.named_parameters())
        self._names, self._parameters = tuple(named), tuple(named.values())
        self._trained = list(map(_requires_grad, self._parameters))
        self._several = any(isinstance(each, GlobalTensor) for each in self._parameters)
        self._optimizers = optimizers
        with torch._C.DisableTorchFunction():
            self._hooks = Hooks(model, optimizers)
        members = self._grouped()
        self._members, self._sizes = list(chain.from_iterable(members)), list(map(len, members))

    def changed(self) -> str | None:
        """The first guard that has changed, from what and to what, in words; some microseconds."""
        entry = self._watch.changed()
        if entry is not None:
            return f"{entry.text} was {entry.then} and is {entry.now}"
        found = self.outside.changed()
        if found is None:
            # Otherwise torch asks the class of each global tensor how it gives its flag.
            with torch._C.DisableTorchFunction() if self._several else _nothing:
                found = self._flag() or self._hooks.changed()
        if found is not None:
            return found
        members = self._grouped()
        same = map(is_, chain.from_iterable(members), self._members)
        if list(map(len, members)) != self._sizes or not all(same):
            return "the parameters in the optimizer's groups were others"
        return None

    def numbers_changed(self) -> list[Guard]:
        """The numbers that are other ones now, of the same type."""
        found = [each for each in self._watch.entries if can_follow(each)]
        return [e for e in found if not e.holds() and type(e.value_now) is type(e.value)]

    def _grouped(self) -> list[list[Any]]:
        """The parameters of each group."""
        return [group["params"] for one in self._optimizers.each for group in one.param_groups]

    def _flag(self) -> str | None:
        now = list(map(_requires_grad, self._parameters))
        if now == self._trained:
            return None
        every = zip(self._names, self._trained, now, strict=True)
        name, before, flag = next(each for each in every if each[1] != each[2])
        return f"{name}.requires_grad was {before} and is {flag}"
