"""Numbers that the step of a user's optimizer changes in the optimizer or its groups, as it counts its calls.

Ranks have copies of an optimizer, for each plan, which would count for themselves. So before each step copies are
given the user's numbers, and after it these go on by a step of one more copy, on a small parameter: the same on every
process. This holds for numbers whose next value depends on themselves alone, whatever is updated; trials show which
do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakKeyDictionary

import torch

from weft.capture.optimizers.attributes import attributes_for_copy, attributes_of, options_of
from weft.capture.optimizers.trials import TRIAL_STEPS, TrialCopies, small_parameter, step

_TYPES = (bool, int, float)


@final
@dataclass(frozen=True)
class StepCounter:
    """A number in the optimizer, or in each of its groups, by its name."""

    name: str
    of_group: bool

    def __str__(self) -> str:
        return f"group[{self.name!r}]" if self.of_group else f"self.{self.name}"


# The ones of each optimizer of which a step was captured.
_COUNTED: WeakKeyDictionary[torch.optim.Optimizer, frozenset[StepCounter]] = WeakKeyDictionary()


def counters_of(optimizer: torch.optim.Optimizer) -> frozenset[StepCounter]:
    """The counters of an optimizer of which a step was captured."""
    return _COUNTED.get(optimizer, frozenset())


def find_counters(copies: TrialCopies, dims: int) -> frozenset[StepCounter]:
    """The numbers that steps change, and that go by themselves alone; they are known as counters from now on.

    Args:
        dims: how many the parameter has that a trial is made for.
    """
    own = small_parameter(dims, 0.0)
    optimizer = copies([own])
    first = _numbers(optimizer)
    alone = []
    try:
        for number in range(TRIAL_STEPS):
            step(optimizer, [own], number + 2.0)
            alone.append(_numbers(optimizer))
        beside = _carried(copies, dims)
    except Exception:
        return frozenset()  # it does not take such small tensors
    found = set()
    for each in {key for numbers in alone for key in numbers}:
        series = [_typed(numbers.get(each)) for numbers in alone]
        changes = any(value != _typed(first.get(each)) for value in series)
        if changes and series == [_typed(numbers.get(each)) for numbers in beside]:
            found.add(each)
    _COUNTED[copies.optimizer] = counters_of(copies.optimizer) | found
    return frozenset(found)


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let the counters of an optimizer of the user's go on, once its parameters are updated on all ranks."""
    counters = counters_of(optimizer)
    if not counters:
        return
    made = []
    with torch.device("cpu"):
        for number, group in enumerate(optimizer.param_groups):
            own = next(iter(group["params"]), None)
            probe = small_parameter(1 if own is None else own.dim(), 0.0)
            put_on = {} if own is None else attributes_of(own)
            copy = TrialCopies(optimizer, number, put_on)([probe])
            step(copy, [probe], 2.0)
            made.append(_numbers(copy))
    for group, numbers in zip(optimizer.param_groups, made, strict=True):
        put_counters(optimizer, [group], {key: numbers[key] for key in counters if key in numbers})


def counted_now(optimizer: torch.optim.Optimizer) -> list[dict[StepCounter, Any]]:
    """The counters as they are, for each group."""
    counters, attributes = counters_of(optimizer), vars(optimizer)
    return [
        {
            each: space[each.name]
            for each in counters
            for space in (group if each.of_group else attributes,)
            if each.name in space
        }
        for group in optimizer.param_groups
    ]


def put_counters(
    optimizer: Any, groups: Sequence[dict[str, Any]], numbers: Mapping[StepCounter, Any]
) -> None:
    """Set counters of an optimizer, and of some of its groups."""
    for counter, value in numbers.items():
        for space in groups if counter.of_group else [vars(optimizer)]:
            space[counter.name] = value


def _carried(copies: TrialCopies, dims: int) -> list[dict[StepCounter, Any]]:
    """The same where each step is that of another copy, on other parameters in two groups, which gets numbers only."""
    found: list[dict[StepCounter, Any]] = []
    for number in range(TRIAL_STEPS):
        every = [small_parameter(dims, phase) for phase in (5.0, 6.0, 7.0)]
        optimizer = copies(every[:2], every[2:])
        if found:
            put_counters(optimizer, optimizer.param_groups, found[-1])
        step(optimizer, every, 30.0 * number + 1.0)
        of_last, now = _numbers(optimizer, -1), _numbers(optimizer)
        found.append({key: x for key, x in now.items() if _typed(of_last.get(key)) == _typed(x)})
    return found


def _numbers(optimizer: Any, group: int = 0) -> dict[StepCounter, Any]:
    options = options_of(optimizer.param_groups[group])
    places = ((attributes_for_copy(optimizer), False), (options, True))
    return {
        StepCounter(name, of_group): value
        for space, of_group in places
        for name, value in space.items()
        if type(value) in _TYPES
    }


def _typed(value: Any) -> tuple[str, str]:
    """A key that tells numbers apart as Python shows them; nan is nan."""
    return type(value).__name__, repr(value)
