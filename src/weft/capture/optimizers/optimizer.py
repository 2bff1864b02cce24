"""The update of one parameter, found by running the optimizer's own `step` on tensors without data.

Hyperparameters are not looked at: they stay with the user's optimizer, so schedules need no new graph. Only four
things are found out: which states a parameter has, which group it is in, whether the update is element-wise, and what
memory it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any, final

import torch

from weft.capture.optimizers.checks import (
    check_apart,
    of_no_parameter,
    refuse_step,
    updates_parts_alike,
)
from weft.capture.optimizers.counted import count_step, counters_of, find_counters
from weft.capture.optimizers.foreign import check_foreign, check_repeats, steps_of_states
from weft.capture.optimizers.given import (
    attributes_of,
    give_attributes,
    is_foreign,
)
from weft.capture.optimizers.groups import Optimizers
from weft.capture.optimizers.kernels import clones_gradients, copy_for, copy_in_groups, kernels_of
from weft.capture.optimizers.observer import StepObserver
from weft.errors import CaptureError
from weft.ir.nodes import MASTER, NO_UPDATE_BYTES, UpdateBytes
from weft.ops.dtypes import dtype_name

_AGAIN = "close the program, weft.release(model, optimizer), and compile again"


@final
@dataclass(frozen=True, slots=True)
class StateSpec:
    """A tensor that the optimizer keeps for a parameter, such as "exp_avg"."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@final
@dataclass(frozen=True, slots=True)
class UpdateRule:
    """The update of one parameter.

    Attributes:
        optimizer: name of the class.
        group: number of the parameter group through all optimizers (`weft.capture.optimizers.groups`).
        states: that it keeps.
        elementwise: whether it works element by element.
        takes: the memory that it takes.
    """

    optimizer: str
    group: int
    states: tuple[StateSpec, ...]
    elementwise: bool
    takes: UpdateBytes = NO_UPDATE_BYTES


def groups_of(optimizers: Optimizers, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The number of the parameter group of each of the model's parameters that an optimizer updates.

    Raises:
        CaptureError: when an optimizer holds a tensor that is no parameter of the model, or two
            hold the same.
    """
    names = {id(parameter): name for name, parameter in parameters.items()}
    groups: dict[str, int] = {}
    owners: dict[str, str] = {}
    for label, number, group in optimizers.groups():
        for position, parameter in enumerate(group["params"]):
            name = names.get(id(parameter))
            if name is None:
                raise CaptureError(
                    f"entry {position} of {label} "
                    f"({dtype_name(parameter.dtype)}{list(parameter.shape)}) is no parameter of the model; "
                    "build the optimizer from model.parameters() of the same model, after any change to it"
                )
            if name in groups:
                raise CaptureError(
                    f"{name} is in {owners[name]} and in {label}; expected each parameter in one optimizer: leave it "
                    "out of the other one's parameters"
                )
            groups[name], owners[name] = number, label
    return groups


def update_rules(
    optimizers: Optimizers,
    parameters: Mapping[str, torch.Tensor],
    groups: dict[str, int],
    masters: bool = False,
    device_type: str = "cpu",
) -> dict[str, UpdateRule]:
    """The rule for each parameter in `groups`; equal parameters of one group are tried once.

    `device_type` is that of the ranks, which decides what memory an update takes. With `masters`,
    a parameter of half precision is updated by way of a float32 copy, which is one
    of its states.

    Raises:
        CaptureError: naming the optimizer, when its step cannot run on tensors without data; when
            no parameter needs a master.
    """
    if masters and groups and not any(_is_half(parameters[name]) for name in groups):
        raise CaptureError(
            "weft.Precision(masters=True) keeps float32 copies of parameters of half precision, but the "
            "optimizer updates none; call model.bfloat16() before the optimizer is made, or leave masters "
            "out: parameters that are float32 are their own masters"
        )
    # What an optimizer's step makes lies where values are looked at, whatever device is the user's default.
    with torch.device("cpu"):
        return _rules(optimizers, parameters, groups, masters, device_type)


def _rules(
    optimizers: Optimizers,
    parameters: Mapping[str, torch.Tensor],
    groups: dict[str, int],
    masters: bool,
    device_type: str,
) -> dict[str, UpdateRule]:
    tried: dict[Any, UpdateRule] = {}
    cut: dict[Any, bool] = {}
    rules = {}
    for name, group in groups.items():
        parameter = parameters[name]
        optimizer, own = optimizers.place(group)
        put_on = attributes_of(parameter) if is_foreign(optimizer) else {}
        marks = tuple((key, _mark(value)) for key, value in put_on.items())
        kind = (group, tuple(parameter.shape), parameter.dtype, marks)
        if kind not in tried:
            master = masters and _is_half(parameter)
            rule = replace(_try(optimizer, own, parameter, name, master), group=group)
            tried[kind] = _with_memory(rule, optimizer, own, parameter, master, device_type)
        dims = (group, parameter.dim(), marks)
        if dims not in cut:
            copy = partial(copy_for, optimizer, own, put_on=put_on)
            copies = partial(copy_in_groups, optimizer, own, put_on)
            if is_foreign(optimizer):
                check_repeats(optimizer, copies, name, parameter.dim())
            check_apart(optimizer, copy, name, parameter.dim())
            if is_foreign(optimizer):
                counters = set(map(str, find_counters(optimizer, copies, parameter.dim())))
                check_foreign(optimizer, copies, name, parameter.dim(), own, counters)
            cut[dims] = updates_parts_alike(copy, parameter.dim())
        rules[name] = replace(tried[kind], elementwise=tried[kind].elementwise and cut[dims])
    return rules


def with_states_of(
    rules: Mapping[str, UpdateRule], before: Mapping[str, UpdateRule]
) -> dict[str, UpdateRule]:
    """The rules, with the states that earlier ones gave the same parameters: a momentum that is 0 now keeps its buffer.

    Raises:
        CaptureError: naming a parameter whose update keeps more.
    """
    found = dict(rules)
    for name in rules.keys() & before.keys():
        rule, old = rules[name], before[name]
        more = {state.name for state in rule.states} - {state.name for state in old.states}
        if more:
            raise CaptureError(
                f"the update of {name} keeps {', '.join(sorted(more))} now, and did not when the step was compiled, as "
                f"options of its group in {rule.optimizer} were others; {_AGAIN}"
            )
        elementwise = rule.elementwise and old.elementwise
        found[name] = replace(rule, states=old.states, elementwise=elementwise)
    return found


def _try(
    optimizer: torch.optim.Optimizer,
    group: int,
    parameter: torch.Tensor,
    name: str,
    master: bool,
) -> UpdateRule:
    dtype = torch.float32 if master else parameter.dtype
    put_on = attributes_of(parameter) if is_foreign(optimizer) else {}
    try:
        states, mixing = _trial(optimizer, group, parameter.shape, dtype, put_on)
        if parameter.numel() == 1 and parameter.dim():
            # Of one element ops do not show whether they mix elements.
            _, mixing = _trial(optimizer, group, [2] * parameter.dim(), dtype, put_on)
    except CaptureError:
        raise
    except Exception as error:
        raise refuse_step(optimizer, name, error) from error
    if any(state.name == MASTER for state in states):
        raise CaptureError(
            f"the optimizer {type(optimizer).__name__} keeps a state {MASTER!r}, a name that weft keeps "
            "for itself; give the state another name"
        )
    if master:
        states = (*states, StateSpec(MASTER, tuple(parameter.shape), dtype_name(dtype)))
    return UpdateRule(type(optimizer).__name__, group, states, elementwise=not mixing)


def _with_memory(
    rule: UpdateRule,
    optimizer: torch.optim.Optimizer,
    group: int,
    parameter: torch.Tensor,
    master: bool,
    device_type: str,
) -> UpdateRule:
    """The rule with the bytes that updates take for each element."""
    elements = parameter.numel()
    options = optimizer.param_groups[group]
    dtypes = {torch.float32 if master and _is_half(x) else x.dtype for x in options["params"]}
    kernels = kernels_of(options, device_type, dtypes)
    if kernels == "fused":
        rule = replace(rule, states=tuple(map(_counted_by_fused, rule.states)))
    if not elements:
        return rule
    dtype = torch.float32 if master else parameter.dtype
    own = elements * dtype.itemsize if clones_gradients(optimizer, kernels == "lists") else 0
    taken = (parameter.shape or (1,), dtype)  # masks of no dimension are read as flags
    put_on = attributes_of(parameter) if is_foreign(optimizer) else {}
    match kernels:
        case "fused":
            sizes = (0, 0, own)
        case "lists":
            sizes = (0, 0, own + _taken(optimizer, group, *taken, lists=True, put_on=put_on))
        case "loop":
            alone = _taken(optimizer, group, *taken, put_on=put_on)
            two = _taken(optimizer, group, *taken, count=2, put_on=put_on)
            sizes = (alone, two - alone, own)
    return replace(rule, takes=UpdateBytes(*(-(-size // elements) for size in sizes)))


def _counted_by_fused(state: StateSpec) -> StateSpec:
    """A state as fused kernels keep it: they count in float32, loops in torch's default dtype where that is float64."""
    is_count = state.name == "step" and not state.shape and state.dtype == "float64"
    return replace(state, dtype="float32") if is_count else state


def _trial(
    optimizer: torch.optim.Optimizer,
    group: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    put_on: Mapping[str, Any],
) -> tuple[tuple[StateSpec, ...], bool]:
    """Two steps on a parameter without data: the states that it gets, and whether its elements are mixed."""
    try:
        return _stepped(optimizer, group, shape, dtype, put_on)
    except TypeError:
        if len(shape):
            raise
    # Masks of no dimension are read as flags where a tensor is indexed by them (`sign[sign.gt(0)] = 1`).
    states, mixing = _stepped(optimizer, group, [1], dtype, put_on)
    return tuple(replace(s, shape=() if s.shape == (1,) else s.shape) for s in states), mixing


def _stepped(
    optimizer: torch.optim.Optimizer,
    group: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    put_on: Mapping[str, Any],
) -> tuple[tuple[StateSpec, ...], bool]:
    copy, probe = _probed(optimizer, group, shape, dtype)
    give_attributes(probe, put_on)
    options = dict(copy.param_groups[0])
    observer = StepObserver()
    foreign, copies = is_foreign(optimizer), partial(copy_in_groups, optimizer, group, put_on)
    states: dict[str, StateSpec] = {}
    # Twice: some states appear with the first step, some ops only with the second.
    for _ in range(steps_of_states(copies, len(shape)) if foreign else 2):
        probe.grad = torch.empty_like(probe)
        with observer:
            copy.step()
        states |= {each.name: each for each in _states(copy, probe)}
    counters: Collection[str] = ()
    if foreign and _changed(options, copy.param_groups[0]):
        counters = {
            each.name for each in find_counters(optimizer, copies, len(shape)) if each.of_group
        }
    for name in _changed(options, copy.param_groups[0]):
        if name not in counters:
            raise CaptureError(
                f"the optimizer {type(optimizer).__name__} cannot be captured: its step changes {name!r} of the "
                "parameter group; expected an update that looks at one parameter at a time, and numbers in the group "
                "that go by themselves, as a counter does"
            )
    _check_draws(optimizer, observer.draws)
    return tuple(states.values()), bool(observer.mixing)


def _taken(
    optimizer: torch.optim.Optimizer,
    group: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    count: int = 1,
    lists: bool = False,
    put_on: Mapping[str, Any] = MappingProxyType({}),
) -> int:
    """The most bytes that a step takes for `count` equal parameters beside their states."""
    copy, *probes = _probed(optimizer, group, shape, dtype, count)
    for probe in probes:
        give_attributes(probe, put_on)
    if lists:
        copy.param_groups[0]["foreach"] = True
    observer = StepObserver()
    most = 0
    # The first step makes the states, which stay.
    for _ in range(2):
        for probe in probes:
            probe.grad = torch.empty_like(probe)
        before, observer.held.most = observer.held.now, observer.held.now
        with observer:
            copy.step()
        most = max(most, observer.held.most - max(before, observer.held.now))
    return most


def _probed(
    optimizer: torch.optim.Optimizer,
    group: int,
    shape: Sequence[int],
    dtype: torch.dtype,
    count: int = 1,
) -> tuple[Any, ...]:
    """A copy of the optimizer, and the parameters without data that it holds."""
    data = (torch.empty(shape, device="meta", dtype=dtype) for _ in range(count))
    probes = [torch.nn.Parameter(each) for each in data]
    return copy_for(optimizer, group, *probes), *probes


def _is_half(parameter: torch.Tensor) -> bool:
    return parameter.dtype in (torch.float16, torch.bfloat16)


def _mark(value: Any) -> Any:
    """A key that tells two values of an attribute apart."""
    plain = value is None or isinstance(value, int | float | str)
    return (type(value).__name__, value) if plain else id(value)


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """The names of options that are others, or new."""
    return [
        name
        for name, value in after.items()
        if name not in before or not (value is before[name] or value == before[name])
    ]


def count_steps(optimizer: torch.optim.Optimizer) -> None:
    """Let the counters of an optimizer of the user's go on, once its parameters are updated on all ranks."""
    if counters_of(optimizer):
        count_step(optimizer, lambda group, own: copy_for(optimizer, group, own))


def _is_empty(value: Any) -> bool:
    return value is None or (isinstance(value, dict) and not value)


def _check_draws(optimizer: object, draws: Sequence[str]) -> None:
    """Refuse optimizers that draw random numbers: ranks that hold the same parameter would draw different ones."""
    if draws:
        raise CaptureError(
            f"the optimizer {type(optimizer).__name__} cannot be captured: its step draws random numbers "
            f"({draws[0]}), and ranks that hold the same parameter would draw different ones; expected an update that "
            "draws none. Noise may be drawn in the loss function, or added to the model between steps"
        )


def _states(copy: Any, probe: torch.Tensor) -> tuple[StateSpec, ...]:
    found = []
    others = [key for key in copy.state if key is not probe and not _is_empty(copy.state[key])]
    if others:
        raise of_no_parameter(copy, others[0])
    for name, value in copy.state[probe].items():
        if isinstance(value, torch.Tensor):
            found.append(StateSpec(name, tuple(value.shape), dtype_name(value.dtype)))
        elif isinstance(value, list | tuple | dict | set | deque) and value:
            raise CaptureError(
                f"the optimizer {type(copy).__name__} cannot be captured: its state {name!r} is a "
                f"{type(value).__name__}; expected one tensor for each state: keep a list "
                "stacked in one (torch.stack), or each entry under a name of its own"
            )
    return tuple(found)
