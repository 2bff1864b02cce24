"""Options that are changed between steps: which states an update keeps by them, and whether a program has these."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, final

import torch

from weft.capture.optimizers.groups import Optimizers
from weft.capture.optimizers.kernels import copy_for
from weft.capture.optimizers.observer import StepObserver
from weft.errors import UserError


def states_kept(optimizer: torch.optim.Optimizer, group: int, options: Any) -> frozenset[str]:
    """The names of the states that a group's updates keep by these options; none where that is not to be seen."""
    parameter = next(iter(optimizer.param_groups[group]["params"]), None)
    if parameter is None:
        return frozenset()
    probe = torch.nn.Parameter(torch.empty(parameter.shape, device="meta"))
    copy = copy_for(optimizer, group, probe)
    copy.param_groups[0].update(options)
    probe.grad = torch.empty_like(probe)
    try:
        with StepObserver():
            copy.step()
    except Exception:
        return frozenset()
    return frozenset(name for name, x in copy.state[probe].items() if isinstance(x, torch.Tensor))


@final
class KeptStates:
    """The states that updates keep, by the options that the groups had when the step was compiled.

    Args:
        optimizers: the user's.
    """

    def __init__(self, optimizers: Optimizers) -> None:
        self._optimizers = optimizers
        self._first: dict[int, dict[str, Any]] = {}
        self._seen: list[dict[str, Any]] = []
        self.check()

    def check(self) -> None:
        """Raise UserError, naming the option, when an update keeps a state by now that it did not keep."""
        groups = [
            (label, number, {key: x for key, x in group.items() if key != "params"})
            for label, number, group in self._optimizers.groups()
        ]
        flags = [{key: _flag(x) for key, x in options.items()} for *_, options in groups]
        if flags == self._seen:
            return
        for label, number, options in groups:
            self._compare(label, number, options, self._first.setdefault(number, options))
        self._seen = flags

    def _compare(
        self, label: str, number: int, now: Mapping[str, Any], then: Mapping[str, Any]
    ) -> None:
        other = [key for key in now if key in then and _flag(now[key]) != _flag(then[key])]
        place = self._optimizers.place(number)
        for key in other:
            plain = {each: then[each] for each in other}
            more = states_kept(*place, {**plain, key: now[key]}) - states_kept(*place, plain)
            if more:
                raise UserError(
                    f"{label}: {key!r} was {then[key]!r} when the step was compiled, and is {now[key]!r}: the update "
                    f"keeps {', '.join(sorted(more))} then, for which the program has no place; close the "
                    "program, weft.release(model, optimizer), and compile again"
                )


def _flag(option: Any) -> Any:
    """The part of an option that decides which states there are: whether it is 0, not how large."""
    return type(option).__name__ if isinstance(option, torch.Tensor) else bool(option)
