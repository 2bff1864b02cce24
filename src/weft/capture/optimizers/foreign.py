"""Optimizers that are none of torch's own: checks that an update goes by nothing that copies of an optimizer lack.

A rank updates its parts by such copies (`given.py`), each with some of the parameters. So an update may look at its own
parameter, with its gradient, state and attributes, at the options of its group, and at what the user has put on the
optimizer; not at its place among others, at random numbers, or at what steps have left in the optimizer itself. Trials
on small tensors with values show what ops do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import FunctionType, MethodType, ModuleType
from typing import Any, TypeAlias, final

import torch

from weft.capture.optimizers.given import attributes_for_copy, options_of, owned
from weft.errors import CaptureError

# `make(*groups)`: a copy of the user's optimizer, with one group of these parameters for each.
Make: TypeAlias = Callable[..., Any]

# Steps of a trial: enough to see what is done every few steps.
TRIAL_STEPS = 12
# How deep attributes of objects are compared, and what has none that a step would write to.
_DEPTH = 3
_CODE = (type, FunctionType, MethodType, ModuleType, torch.nn.Module)
# In the place of a value that was not there.
_ABSENT = object()


def steps_of_states(make: Make, dims: int) -> int:
    """The steps after which an update has made all its states, two at least, as trials on small tensors show.

    Args:
        make, dims: as in `check_repeats`.
    """
    parameter, names, steps = torch.nn.Parameter(small_values(dims, 0.0)), set[str](), 2
    optimizer = make([parameter])
    try:
        for step in range(TRIAL_STEPS):
            parameter.grad = small_values(dims, step + 2.0)
            optimizer.step()
            if new := optimizer.state[parameter].keys() - names:
                names, steps = names | new, max(steps, step + 1)
    except Exception:
        return 2  # as in `check_foreign`
    return steps


def check_repeats(optimizer: object, make: Make, name: str, dims: int) -> None:
    """Check, on small tensors with values, that an update of the user's is the same when it runs again.

    Args:
        optimizer: the user's, for the error.
        make: of copies.
        name: of a parameter, for the error.
        dims: how many the parameter has.

    Raises:
        CaptureError: when it is another one, as where it draws random numbers.
    """
    trials = _Trials(make, dims)
    try:
        same = _alike(trials.alone(), trials.alone())
    except Exception:
        return  # it does not take such small tensors; the trial on the true shape says what is wrong
    if not same:
        raise _refused(
            optimizer,
            name,
            "is another one when it runs again, as with random numbers, of which ranks that hold the same parameter "
            "would draw different ones",
        )


def check_foreign(
    optimizer: torch.optim.Optimizer,
    make: Make,
    name: str,
    dims: int,
    group: int,
    counters: Collection[str],
) -> None:
    """Check, on small tensors with values, that an update of the user's depends on nothing that copies lack.

    Args:
        optimizer, make, name, dims: as in `check_repeats`.
        group: the place of the parameter's group in the optimizer.
        counters: numbers that all copies are given, and that go on by themselves, as `self.calls`.

    Raises:
        CaptureError: when it goes by its place, or by what earlier steps have left in the optimizer.
    """
    trials, count = _Trials(make, dims), len(optimizer.param_groups)
    try:
        kept = trials.keeps(counters)
        alone = trials.alone()
        apart = all(_alike(alone, run()) for run in trials.beside_others(group, count))
    except Exception:
        return  # as in `check_repeats`
    if kept:
        raise _refused(
            optimizer,
            name,
            f"goes by {kept}, which its step changes in the optimizer itself: ranks, and other shapes of the batch, "
            "have copies of it that count for themselves",
        )
    if not apart:
        raise _refused(
            optimizer,
            name,
            "goes by its place among the parameters and groups, such as its number, or by options of another group, of "
            "which a rank has only some",
        )


def _refused(optimizer: object, name: str, why: str) -> CaptureError:
    return CaptureError(
        f"the optimizer {type(optimizer).__name__} cannot be captured: its update of one parameter, such as {name!r}, "
        f"{why}. Expected an update by what belongs to the parameter: its gradient, self.state[param], attributes that "
        "stand on it, and the options of its group"
    )


@final
class _Trials:
    """Some steps of copies of an optimizer on small parameters; each gives what a parameter is after them."""

    def __init__(self, make: Make, dims: int) -> None:
        self._make = make
        self._dims = dims

    def alone(self) -> torch.Tensor:
        """The parameter as the only one."""
        own = self._parameter(0.0)
        return _after(self._make([own]), own, [])

    def beside_others(self, index: int, count: int) -> Sequence[Callable[[], torch.Tensor]]:
        """Trials beside another parameter: before and behind it, and in its group among as many as the user has."""
        beside = (lambda own, other: [[own, other]], lambda own, other: [[other, own]])
        found = [partial(self._beside, each, 0) for each in beside]
        if count > 1:
            found.append(partial(self._beside, partial(_in_group, index, count), index))
        return found

    def _beside(self, groups: Callable[[Any, Any], Any], index: int) -> torch.Tensor:
        own, other = self._parameter(0.0), self._parameter(1.0)
        optimizer = self._make(*groups(own, other))
        for number, group in enumerate(optimizer.param_groups):
            if number != index:  # by other options than its own nothing may go
                group.update({key: x / 2 for key, x in group.items() if isinstance(x, float)})
        return _after(optimizer, own, [other])

    def keeps(self, counters: Collection[str]) -> str:
        """The name of what the steps leave in the optimizer for later ones; "" where they go by nothing of it.

        Args:
            counters: that may be left.
        """
        own = self._parameter(0.0)
        optimizer = self._make([own])
        first = _left(optimizer)
        going_on = _after(optimizer, own, [])
        now = _left(optimizer)
        changed = [
            key
            for key, value in now.items()
            if key not in counters and first.get(key, _ABSENT) != value
        ]
        if not changed:
            return ""
        written = [key for key in changed if _counts(first.get(key), now[key])]
        own = self._parameter(0.0)
        again = _after(self._make([own]), own, [], anew=counters)
        return "" if not written and _alike(going_on, again) else (written or changed)[0]

    def _parameter(self, phase: float) -> torch.nn.Parameter:
        return torch.nn.Parameter(small_values(self._dims, phase))


def _in_group(index: int, count: int, own: Any, other: Any) -> list[list[Any]]:
    """Groups as many as the user's, one with the parameter, one of the others with the other."""
    found: list[list[Any]] = [[] for _ in range(count)]
    found[index].append(own)
    found[(index + 1) % count].append(other)
    return found


def _counts(before: Any, now: Any) -> bool:
    """True where a number was counted, or a tensor or an object written: what comes of it may be seen only later."""
    match before, now:
        case (_Same(), _Same()):
            return before.id == now.id
        case (int() | None, int()):
            return not isinstance(now, bool)
    return False


def _left(optimizer: Any) -> dict[str, Any]:
    """The parts of an optimizer of one group that its steps may have written to, beside states, to compare."""
    (group,) = optimizer.param_groups
    attributes = attributes_for_copy(optimizer).items()
    found = {f"self.{name}": _frozen(x) for name, x in attributes}
    return found | {f"group[{key!r}]": _frozen(x) for key, x in options_of(group).items()}


@final
@dataclass(frozen=True)
class _Same:
    """A tensor or an object of the user's, and what it holds."""

    id: int
    content: object


def _frozen(value: Any, depth: int = 0) -> Any:
    """A value that is equal to that of another time where nothing in it has changed."""
    match value:
        case torch.Tensor():
            return _Same(id(value), value._version)
        case dict():
            return [(_frozen(key, depth), _frozen(x, depth)) for key, x in value.items()]
        case list() | tuple() | deque():
            return [type(value).__name__, *(_frozen(x, depth) for x in value)]
        case bool() | int() | float() | str() | None:
            return value
    own = vars(value) if hasattr(value, "__dict__") and depth < _DEPTH else {}
    plain = own and not isinstance(value, _CODE)
    return _Same(id(value), _frozen(dict(own), depth + 1) if plain else None)


def _after(
    optimizer: Any,
    own: torch.nn.Parameter,
    others: Sequence[torch.nn.Parameter],
    anew: Collection[str] | None = None,
) -> torch.Tensor:
    """A parameter after some steps; with `anew`, each on what the optimizer was at first, but for states and these."""
    first = attributes_for_copy(optimizer), [options_of(group) for group in optimizer.param_groups]
    with torch.random.fork_rng(devices=[]):
        for step in range(TRIAL_STEPS):
            for place, parameter in enumerate((own, *others)):
                parameter.grad = small_values(own.dim(), step + 2.0 - 7 * place)
            if anew is not None:
                _put_back(optimizer, *first, anew)
            optimizer.step()
    return own.detach()


def _put_back(
    optimizer: Any,
    attributes: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    but: Collection[str],
) -> None:
    for name in attributes_for_copy(optimizer).keys() - attributes.keys():
        if f"self.{name}" not in but:
            delattr(optimizer, name)
    kept = {name: x for name, x in attributes.items() if f"self.{name}" not in but}
    vars(optimizer).update({name: owned(value) for name, value in kept.items()})
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for name in group.keys() - options.keys() - {"params"}:
            if f"group[{name!r}]" not in but:
                del group[name]
        kept = {name: x for name, x in options.items() if f"group[{name!r}]" not in but}
        group.update({name: owned(value) for name, value in kept.items()})


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def small_values(dims: int, phase: float) -> torch.Tensor:
    """A tensor for trials: 3 elements along each dimension, enough for any way of mixing them; others by phase."""
    count = 3**dims
    return torch.sin(torch.arange(count, dtype=torch.float32) + phase).reshape([3] * dims)
