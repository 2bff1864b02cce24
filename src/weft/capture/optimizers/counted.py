"""Numbers that the step of a user's optimizer changes in the optimizer or its groups, as it counts its calls.

Ranks have copies of an optimizer, for each plan, which would count for themselves. So before each step copies are given
the user's numbers, and after it these go on by a step of one more copy, on a small parameter: the same on every
process. That is right for numbers that go by themselves alone, whatever is updated; trials show which do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final
from weakref import WeakKeyDictionary

import torch

from weft.capture.optimizers.foreign import TRIAL_STEPS, Make, small_values
from weft.capture.optimizers.given import attributes_for_copy, attributes_of, options_of

_TYPES = (bool, int, float)


@final
@dataclass(frozen=True)
class StepCounter:
    """A number in the optimizer, or in each of its groups, by its name."""

    name: str
    of_group: bool

    def __str__(self) -> str:
        return f"group[{self.name!r}]" if self.of_group else f"self.{self.name}"


# Those of each optimizer of which a step was captured.
_COUNTED: WeakKeyDictionary[torch.optim.Optimizer, frozenset[StepCounter]] = WeakKeyDictionary()


def counters_of(optimizer: torch.optim.Optimizer) -> frozenset[StepCounter]:
    """The counters of an optimizer of which a step was captured."""
    return _COUNTED.get(optimizer, frozenset())


def find_counters(
    optimizer: torch.optim.Optimizer, make: Make, dims: int
) -> frozenset[StepCounter]:
    """The numbers that steps change, and that go by themselves alone; they are known as counters from now on.

    Args:
        optimizer: the user's.
        make: makes copies of it.
        dims: how many the parameter has that a trial is made for.
    """
    first = _numbers(make([_parameter(dims, 0.0)]))
    try:
        alone, beside = _alone(make, dims), _carried(make, dims)
    except Exception:
        return frozenset()  # it does not take such small tensors
    found = set()
    for each in {key for step in alone for key in step}:
        series = [_typed(step.get(each)) for step in alone]
        changes = any(value != _typed(first.get(each)) for value in series)
        if changes and series == [_typed(step.get(each)) for step in beside]:
            found.add(each)
    _COUNTED[optimizer] = counters_of(optimizer) | found
    return frozenset(found)


def count_step(
    optimizer: torch.optim.Optimizer, copy: Callable[[int, torch.nn.Parameter], Any]
) -> None:
    """Let the counters of an optimizer go on, as after a step of it.

    Args:
        optimizer: the user's.
        copy: `copy(group, parameter)` is one that holds only this parameter, with the options of that group.
    """
    counters = counters_of(optimizer)
    if not counters:
        return
    made = []
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        for number, group in enumerate(optimizer.param_groups):
            own = next(iter(group["params"]), None)
            probe = _parameter(1 if own is None else own.dim(), 0.0)
            given = copy(number, probe)
            vars(probe).update({} if own is None else attributes_of(own))
            probe.grad = small_values(probe.dim(), 2.0)
            given.step()
            made.append(_numbers(given))
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


def _alone(make: Make, dims: int) -> list[dict[StepCounter, Any]]:
    """The numbers after each of some steps of one optimizer on one parameter."""
    own = _parameter(dims, 0.0)
    optimizer = make([own])
    return [_stepped(optimizer, [own], step + 2.0) for step in range(TRIAL_STEPS)]


def _carried(make: Make, dims: int) -> list[dict[StepCounter, Any]]:
    """The same where each step is that of another copy, on other parameters in two groups, which gets numbers only."""
    found: list[dict[StepCounter, Any]] = []
    for step in range(TRIAL_STEPS):
        every = [_parameter(dims, phase) for phase in (5.0, 6.0, 7.0)]
        optimizer = make(every[:2], every[2:])
        if found:
            put_counters(optimizer, optimizer.param_groups, found[-1])
        now = _stepped(optimizer, every, 30.0 * step + 1.0)
        of_last = _numbers(optimizer, -1)
        found.append({key: x for key, x in now.items() if _typed(of_last.get(key)) == _typed(x)})
    return found


def _stepped(
    optimizer: Any, parameters: Sequence[torch.nn.Parameter], phase: float
) -> dict[StepCounter, Any]:
    for number, each in enumerate(parameters):
        each.grad = small_values(each.dim(), phase - 7.0 * number)
    with torch.random.fork_rng(devices=[]):
        optimizer.step()
    return _numbers(optimizer)


def _numbers(optimizer: Any, group: int = 0) -> dict[StepCounter, Any]:
    """The plain numbers of an optimizer and of one of its groups."""
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


def _parameter(dims: int, phase: float) -> torch.nn.Parameter:
    return torch.nn.Parameter(small_values(dims, phase))
