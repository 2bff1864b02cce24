"""Trials that an update depends on nothing that copies of an optimizer lack; mainly for optimizers outside torch.

A rank updates its shards with such copies (`attributes.py`), each with some of the parameters. So an update
may read its parameter, gradient, state and attributes, the options of its group, and the user's attributes of the
optimizer; it may not read its place among the parameters, random numbers, or state that steps keep in the optimizer
itself. Trials on small tensors show dependences that the ops do not.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from types import FunctionType, MethodType, ModuleType
from typing import Any, final

import torch

from weft.capture.optimizers.attributes import attributes_for_copy, options_of, unshared_copy
from weft.capture.optimizers.trials import (
    TRIAL_STEPS,
    TrialCopies,
    small_parameter,
    small_values,
    step,
)
from weft.errors import CaptureError

# How deep attributes of objects are compared, and what has none that a step would write to.
_DEPTH = 3
_CODE = (type, FunctionType, MethodType, ModuleType, torch.nn.Module)
# In the place of a value that was not there.
_ABSENT = object()


def steps_of_states(copies: TrialCopies, dims: int) -> int:
    """The steps after which an update has made all its states, two at least, as trials on small tensors show."""
    parameter, names, steps = small_parameter(dims, 0.0), set[str](), 2
    optimizer = copies([parameter])
    try:
        for number in range(TRIAL_STEPS):
            step(optimizer, [parameter], number + 2.0)
            if new := optimizer.state[parameter].keys() - names:
                names, steps = names | new, max(steps, number + 1)
    except Exception:
        return 2  # as in `check_foreign`
    return steps


def check_repeats(copies: TrialCopies, name: str, dims: int) -> None:
    """Check, on small tensors with values, that a user-defined update is repeatable.

    Raises:
        CaptureError: when a second run differs, as with random numbers.
    """
    try:
        same = _alike(_parameter_after_steps(copies, dims), _parameter_after_steps(copies, dims))
    except Exception:
        return  # it does not take such small tensors; the trial on the true shape says what is wrong
    if not same:
        raise _refused(
            copies.optimizer,
            name,
            "gives another result when it runs again, as with random numbers: ranks that hold the same parameter "
            "would draw different numbers",
        )


def check_foreign(copies: TrialCopies, name: str, dims: int, counters: Collection[str]) -> None:
    """Check, on small tensors with values, that a user-defined update depends on nothing that copies lack.

    Args:
        counters: numbers that all copies have, and that count by themselves, such as `self.calls`.

    Raises:
        CaptureError: when it depends on its place, or on state that earlier steps left in the optimizer.
    """
    count = len(copies.optimizer.param_groups)
    # Before and behind another parameter, and in its group among as many as the user has.
    places = [(0, [[0, 1]]), (0, [[1, 0]])]
    if count > 1:
        groups: list[list[int]] = [[] for _ in range(count)]
        groups[copies.group].append(0)
        groups[(copies.group + 1) % count].append(1)
        places.append((copies.group, groups))
    try:
        kept = _leftover_name(copies, dims, counters)
        alone = _parameter_after_steps(copies, dims)
        apart = all(_alike(alone, _parameter_after_steps(copies, dims, *place)) for place in places)
    except Exception:
        return  # as in `check_repeats`
    if kept:
        raise _refused(
            copies.optimizer,
            name,
            f"depends on {kept}, which its step changes in the optimizer itself: each rank, and each shape of the "
            "batch, has its own copy of the optimizer",
        )
    if not apart:
        raise _refused(
            copies.optimizer,
            name,
            "depends on its place among the parameters and groups, such as its number, or on options of another "
            "group; a rank has only some of the groups",
        )


def _refused(optimizer: object, name: str, why: str) -> CaptureError:
    return CaptureError(
        f"the optimizer {type(optimizer).__name__} cannot be captured: its update of one parameter, such as {name!r}, "
        f"{why}. The update may read what belongs to the parameter: its gradient, self.state[param], its attributes, "
        "and the options of its group"
    )


def _parameter_after_steps(
    copies: TrialCopies,
    dims: int,
    index: int = 0,
    groups: Sequence[Sequence[int]] = ((0,),),
    scale: float = 1.0,
) -> torch.Tensor:
    """Parameter 0 after some steps of a copy.

    Args:
        copies: of the user's optimizer.
        dims: of the parameters.
        index: of the group that has the options of the parameter's; others get other ones.
        groups: of one or both of two parameters, by number.
        scale: of the gradient of parameter 1.
    """
    both = [small_parameter(dims, phase) for phase in (0.0, 1.0)]
    optimizer = copies(*([both[number] for number in group] for group in groups))
    for number, group in enumerate(optimizer.param_groups):
        if number != index:
            group.update({key: x / 2 for key, x in group.items() if isinstance(x, float)})
    return _after(optimizer, both[: sum(map(len, groups))], scale=scale)


def _leftover_name(copies: TrialCopies, dims: int, counters: Collection[str]) -> str:
    """The name of what the steps leave in the optimizer for later ones; "" if they depend on nothing of it."""
    own = small_parameter(dims, 0.0)
    optimizer = copies([own])
    first = _written_attributes(optimizer)
    going_on = _after(optimizer, [own])
    now = _written_attributes(optimizer)
    changed = [
        key
        for key, value in now.items()
        if key not in counters and first.get(key, _ABSENT) != value
    ]
    if not changed:
        return ""
    # A number was counted, or a tensor or an object written: its effect may be seen only later.
    written = []
    for key in changed:
        match first.get(key), now[key]:
            case (_Same(), _Same()) if first[key].id == now[key].id:
                written.append(key)
            case (int() | None, int()) if not isinstance(now[key], bool):
                written.append(key)
    own = small_parameter(dims, 0.0)
    again = _after(copies([own]), [own], anew=counters)
    return "" if not written and _alike(going_on, again) else (written or changed)[0]


def _written_attributes(optimizer: Any) -> dict[str, Any]:
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
    """Snapshot of `value`, equal to a later one if nothing changed; tensors count by identity and version."""
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
    parameters: Sequence[torch.nn.Parameter],
    anew: Collection[str] | None = None,
    scale: float = 1.0,
) -> torch.Tensor:
    """The first parameter after some steps; with `anew`, each but for states and these on what was at first."""
    first = attributes_for_copy(optimizer), [options_of(group) for group in optimizer.param_groups]
    for number in range(TRIAL_STEPS):
        if anew is not None:
            _put_back(optimizer, *first, anew)
        step(optimizer, parameters, number + 2.0, scale)
    return parameters[0].detach()


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
    vars(optimizer).update({name: unshared_copy(value) for name, value in kept.items()})
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        for name in group.keys() - options.keys() - {"params"}:
            if f"group[{name!r}]" not in but:
                del group[name]
        kept = {name: x for name, x in options.items() if f"group[{name!r}]" not in but}
        group.update({name: unshared_copy(value) for name, value in kept.items()})


def _alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True)


def check_apart(copies: TrialCopies, name: str, dims: int) -> None:
    """Check, on small tensors with values, that the gradient of one parameter changes no other one."""
    try:
        small, large = (
            _parameter_after_steps(copies, dims, 0, [[0, 1]], scale) for scale in (1.0, 30.0)
        )
    except Exception:
        return  # it does not take such small tensors; the trial on the true shape says what is wrong
    # Options that are not numbers make such updates.
    if not torch.allclose(small, large, rtol=0, atol=0, equal_nan=True):
        raise CaptureError(
            f"the optimizer {type(copies.optimizer).__name__} cannot be captured: its update of one parameter, such as "
            f"{name!r}, depends on the gradients of others, and no rank has them all. A norm of all gradients is "
            "clip_norm= of the strategy; otherwise expected an update that looks at one parameter at a time"
        )


def updates_parts_alike(copies: TrialCopies, dims: int) -> bool:
    """True if parts of a small parameter with values are updated as within the whole one, cut along any dimension.

    Ops do not show everything: an update may ask for the parameter's shape.
    """
    values = [small_values(dims, phase) for phase in (0.0, 2.0, 3.0)]
    try:
        whole = _trained_by(copies, values)
        for dim in range(dims):
            cuts = [torch.split(each, [1, 2], dim) for each in values]
            parts = [_trained_by(copies, [cut[place] for cut in cuts]) for place in (0, 1)]
            if not torch.allclose(torch.cat(parts, dim), whole, equal_nan=True):
                return False
    except Exception:
        return True  # it does not take such small tensors; the ops say what there is to know
    return True


def _trained_by(copies: TrialCopies, values: Sequence[torch.Tensor]) -> torch.Tensor:
    parameter = torch.nn.Parameter(values[0].clone())
    optimizer = copies([parameter])
    with torch.random.fork_rng(devices=[]):
        for gradient in values[1:]:
            parameter.grad = gradient.clone()
            optimizer.step()
    return parameter.detach()
