"""The update of a plain step, by the user's own optimizer.

It is given the gradients of the plan, which are compared before: an optimizer such as Adam makes
of a gradient that is zero but for rounding an update as large as any. And it is given gradients a
little larger and smaller, as far as rounding may move them, and between: what comes between is
right. An update need not grow with its gradient, as Adam's second one does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor

from weft.program.verification.compare import Compared, Rounding, difference, largest
from weft.program.verification.eager import plainly, states_lent

# Of the bounds, where updates are tried.
_PARTS = (*(1.0, 0.25, 0.05, 0.01), *(-1.0, -0.25, -0.05, -0.01))


@final
@dataclass(frozen=True)
class PlainUpdate:
    """An update by plain PyTorch.

    Attributes:
        tensors: the live parameters, by key.
        values: whole, before the update; of masters where there are any.
        states: whole, before the update, by key and name.
        gradients: whole.
        bounds: how far rounding may move an element of each gradient.
        clip: the norm to which all gradients together are clipped.
    """

    optimizers: Sequence[torch.optim.Optimizer]
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Tensor]
    states: Mapping[str, Mapping[str, Any]]
    gradients: Mapping[str, Tensor]
    bounds: Mapping[str, float]
    clip: float | None

    def compared(
        self, tensors: Mapping[str, Tensor], states: Mapping[str, Any], by: Rounding
    ) -> Iterator[Compared]:
        """Compare new parameters and states of the plan with those of a plain update.

        Args:
            tensors: parameters by key.
            states: of the parameters that are updated, by key and name, as `key.name`.
            by: what a rounding is.
        """
        middle = self._run(0.0)
        low, high = dict(middle), dict(middle)
        for part in _PARTS:
            for name, each in self._run(part).items():
                if isinstance(each, Tensor) and isinstance(low.get(name), Tensor):
                    low[name] = torch.minimum(low[name], each)
                    high[name] = torch.maximum(high[name], each)
        for name in {**middle, **states}:
            kind = "parameter" if name in self.values else "state"
            found = tensors.get(name, states.get(name))
            expected = [each.get(name) for each in (middle, low, high)]
            yield _between(kind, name, found, expected, self.values.get(name), by)

    def _run(self, part: float) -> dict[str, Any]:
        """Parameters and states after an update by gradients that are moved by a part of their bounds."""
        own = {key: self.tensors[key] for key in self.gradients}
        values = {key: self.values[key].clone() for key in own}
        states = {
            own[key]: {name: _copy(x) for name, x in entries.items()}
            for key, entries in self.states.items()
            if key in own
        }
        with ExitStack() as lent:
            lent.enter_context(plainly(own, values))
            for each in self.optimizers:
                lent.enter_context(states_lent(each, states))
            for key, parameter in own.items():
                gradient = self.gradients[key] + part * self.bounds[key]
                parameter.grad = gradient.to(parameter.dtype)
            if self.clip is not None:
                torch.nn.utils.clip_grad_norm_(own.values(), self.clip)
            for each in self.optimizers:
                each.step()
            made: dict[str, Any] = {key: x.detach().clone() for key, x in own.items()}
            for key, parameter in own.items():
                for each in self.optimizers:
                    own_groups = (group["params"] for group in each.param_groups)
                    if any(parameter is one for every in own_groups for one in every):
                        kept = each.state.get(parameter, {})
                        made.update({f"{key}.{name}": _copy(x) for name, x in kept.items()})
        return made


def _between(
    kind: str,
    name: str,
    found: Any,
    every: list[Any],
    before: Tensor | None,
    by: Rounding,
) -> Compared:
    """Compare with what lies between several expected values, of which the first is the middle."""
    expected = every[0]
    if not isinstance(expected, Tensor):
        differs = isinstance(found, Tensor) or found != expected
        text = f"is {found!r} in the plan, and {expected!r} in the plain step" if differs else ""
        return Compared(kind, name, text=text)
    if not isinstance(found, Tensor):
        return Compared(
            kind, name, text=f"is {found!r} in the plan, and a tensor in the plain step"
        )
    if found.shape != expected.shape:
        return Compared(
            kind,
            name,
            text=f"has shape {list(found.shape)}, and {list(expected.shape)} in the plain step",
        )
    if not expected.numel():
        return Compared(kind, name)
    # A master is compared by way of its parameter.
    here = found.to(expected.device, torch.float64)
    rounded = torch.stack([x.to(found.dtype).to(torch.float64) for x in every])
    change = largest(expected) if before is None else difference(expected, before)
    eps = torch.finfo(found.dtype).eps if found.is_floating_point() else 0.0
    slack = 2 * eps * rounded.abs().amax(0).nan_to_num(nan=0.0, posinf=0.0) + by.of(change)
    outside = torch.maximum(rounded.amin(0) - slack - here, here - rounded.amax(0) - slack)
    same = (here == rounded[0]) | (here.isnan() & rounded[0].isnan())
    outside = torch.where(same, -slack, outside).nan_to_num(nan=float("inf"))
    worst = int(outside.argmax())
    apart = difference(here.flatten()[worst], rounded[0].flatten()[worst])
    allowed = max(apart - float(outside.flatten()[worst]), 0.0)
    return Compared(kind, name, apart, allowed, largest(expected))


def _copy(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
