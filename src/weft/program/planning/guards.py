"""Guards: facts of the capture that the user may change between steps; compared before every step, planned again."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from itertools import chain
from operator import attrgetter, is_, ne
from typing import Any, final

import torch
from torch import Tensor, nn

from weft.capture.capture import Captured
from weft.capture.optimizer_groups import Optimizers
from weft.capture.python.hooks import Hooks
from weft.capture.python.symbolic import can_follow
from weft.capture.python_guards import Guard
from weft.errors import UserError
from weft.program.checksums import checksums, is_checked_step
from weft.runtime.executor.rank_executor import RankExecutor
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
                now = list(map(_requires_grad, self._parameters))
                if now != self._trained:
                    every = zip(self._names, self._trained, now, strict=True)
                    name, before, flag = next(each for each in every if each[1] != each[2])
                    return f"{name}.requires_grad was {before} and is {flag}"
                found = self._hooks.changed()
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
        return [group["params"] for one in self._optimizers.each for group in one.param_groups]


@final
class ExternalTensors:
    """The tensors outside the model that a step reads.

    Ranks share their memory, so that writes in place need nothing. Tensors that get other memory between steps
    (`tensor.data = …`, `set_`, `module.to`) are read there; those that get another shape are a guard.

    Args:
        captured: the step. Tensors that stand for numbers are weft's own.
    """

    def __init__(self, captured: Captured) -> None:
        self._tensors = {
            key: each
            for key, each in captured.constants.items()
            if key not in captured.numbers and not isinstance(each, GlobalTensor)
        }
        self._forms = list(map(_form, self._tensors.values()))
        # As they were compared, followed by the executors, and added up last.
        self._seen = self._followed = list(map(_mark, self._tensors.values()))
        self._added: list[Any] | None = None
        self._on_devices = self._found = 0

    def changed(self) -> str | None:
        """The first one that has another dtype, device, shape or strides, in words; 0.2 microseconds a tensor."""
        seen = list(map(_mark, self._tensors.values()))
        if seen != self._seen:
            forms = list(map(_form, self._tensors.values()))
            for tensor, (place, _) in zip(self._tensors.values(), seen, strict=True):
                if not place and tensor.numel() and tensor.layout == torch.strided:
                    raise UserError(
                        f"a tensor outside the model, {_words(_form(tensor))}, holds no values any more, as torch "
                        "leaves it after tensor.data = … of a live one; use tensor.copy_(weft.whole(…)) instead"
                    )
            for before, now in zip(self._forms, forms, strict=True):
                if before != now:
                    return f"a tensor outside the model was {_words(before)} and is {_words(now)}"
            self._seen = seen
        return None

    def follow(self, executors: Iterable[RankExecutor]) -> None:
        """Let the ranks read them where they are, as `changed` has seen them."""
        if self._seen != self._followed:
            moved = map(ne, self._seen, self._followed)
            found = {
                key: self._tensors[key]
                for key, is_other in zip(self._tensors, moved, strict=True)
                if is_other
            }
            for executor in executors:
                executor.put_constants(found)
            self._followed = self._seen

    def checksum(self, step: int) -> int:
        """Their checksum in a step, which every process must find alike; computed again after a write.

        Writes that torch does not count, such as those through numpy, are seen within some steps. Tensors on devices
        count as they were first, as the host has to wait for them.
        """
        every = self._tensors.values()
        if self._added is None:
            self._on_devices = checksums((x for x in every if not x.is_cpu), 0)
        if self._seen != self._added or is_checked_step(step):
            self._found = checksums((x for x in every if x.is_cpu), 0, self._on_devices)
        self._added = self._seen
        return self._found


def _mark(tensor: Tensor) -> tuple[int, int]:
    """Another one once a tensor is written by torch, or has other memory."""
    place = tensor.data_ptr() if tensor.layout == torch.strided else 0
    return place, 0 if tensor.is_inference() else tensor._version


def _form(tensor: Tensor) -> tuple[Any, ...]:
    strides = tensor.stride() if tensor.layout == torch.strided else ()
    return tensor.dtype, tensor.device, tuple(tensor.shape), strides


def _words(form: tuple[Any, ...]) -> str:
    dtype, device, shape, strides = form
    return f"{dtype} {list(shape)} with strides {list(strides)} on {device}"
