"""The update of one parameter, found by running the optimizer's own `step` on tensors without data.

Hyperparameters stay in the user's optimizer, so schedules need no new graph. Capture finds
four things: the states of a parameter, its group, whether the update is element-wise, and the memory that it takes.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import torch

from weft.capture.optimizer_groups import Optimizers
from weft.capture.optimizers.attributes import (
    attributes_of,
    clones_gradients,
    is_foreign,
    kernels_of,
    of_no_parameter,
    refuse_step,
)
from weft.capture.optimizers.foreign import (
    check_apart,
    check_foreign,
    check_repeats,
    steps_of_states,
    updates_parts_alike,
)
from weft.capture.optimizers.trials import StepObserver, TrialCopies, find_counters
from weft.errors import CaptureError
from weft.ir.nodes import MASTER, NO_UPDATE_BYTES, UpdateBytes
from weft.ops.cost import dtype_name

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
        group: number of the parameter group through all optimizers (`weft.capture.optimizer_groups`).
    """

    optimizer: str
    group: int
    states: tuple[StateSpec, ...]
    elementwise: bool
    takes: UpdateBytes = NO_UPDATE_BYTES


def groups_of(optimizers: Optimizers, parameters: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """The number of the parameter group of each of the model's parameters that an optimizer updates.

    Raises:
        CaptureError: when an optimizer holds a tensor that is not a parameter of the model, or two hold the same.
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
                    f"({dtype_name(parameter.dtype)}{list(parameter.shape)}) is not a parameter of the model; "
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
            no parameter needs an FP32 main parameter.
    """
    if masters and groups and not any(_is_half(parameters[name]) for name in groups):
        raise CaptureError(
            "weft.Precision(masters=True) keeps float32 copies of parameters of half precision, but the "
            "optimizer updates none; call model.bfloat16() before the optimizer is made, or leave masters "
            "out: parameters that are float32 are their own masters"
        )
    tried: dict[Any, UpdateRule] = {}
    cut: dict[Any, bool] = {}
    rules = {}
    # States that an optimizer's step creates are where values are looked at, whatever device is the user's default.
    with torch.device("cpu"):
        for name, group in groups.items():
            parameter = parameters[name]
            optimizer, own = optimizers.place(group)
            copies = TrialCopies(
                optimizer, own, attributes_of(parameter) if is_foreign(optimizer) else {}
            )
            marks = tuple((key, _mark(value)) for key, value in copies.put_on.items())
            kind = (group, tuple(parameter.shape), parameter.dtype, marks)
            if kind not in tried:
                dtype = torch.float32 if masters and _is_half(parameter) else parameter.dtype
                rule = replace(_try(copies, parameter, name, dtype), group=group)
                tried[kind] = _with_memory(rule, copies, parameter, dtype, device_type)
            dims = (group, parameter.dim(), marks)
            if dims not in cut:
                cut[dims] = _check_own_parameter_only(copies, name, parameter.dim())
            elementwise = tried[kind].elementwise and cut[dims]
            rules[name] = replace(tried[kind], elementwise=elementwise)
    return rules


def _check_own_parameter_only(copies: TrialCopies, name: str, dims: int) -> bool:
    """Check that an update looks at its own parameter alone; whether it updates parts as it does the whole."""
    foreign = is_foreign(copies.optimizer)
    if foreign:
        check_repeats(copies, name, dims)
    check_apart(copies, name, dims)
    if foreign:
        check_foreign(copies, name, dims, set(map(str, find_counters(copies, dims))))
    return updates_parts_alike(copies, dims)


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


def _try(copies: TrialCopies, parameter: torch.Tensor, name: str, dtype: torch.dtype) -> UpdateRule:
    optimizer, shape = copies.optimizer, tuple(parameter.shape)
    try:
        states, mixing = _trial(copies, shape, dtype)
        if parameter.numel() == 1 and parameter.dim():
            # For one element ops do not show whether they mix elements.
            _, mixing = _trial(copies, [2] * parameter.dim(), dtype)
    except CaptureError:
        raise
    except Exception as error:
        raise refuse_step(optimizer, name, error) from error
    if any(state.name == MASTER for state in states):
        raise CaptureError(
            f"the optimizer {type(optimizer).__name__} keeps a state {MASTER!r}, a name that weft keeps "
            "for itself; give the state another name"
        )
    if dtype != parameter.dtype:
        states = (*states, StateSpec(MASTER, shape, dtype_name(dtype)))
    return UpdateRule(type(optimizer).__name__, copies.group, states, elementwise=not mixing)


def _with_memory(
    rule: UpdateRule,
    copies: TrialCopies,
    parameter: torch.Tensor,
    dtype: torch.dtype,
    device_type: str,
) -> UpdateRule:
    elements = parameter.numel()
    options = copies.optimizer.param_groups[copies.group]
    master = dtype != parameter.dtype
    dtypes = {torch.float32 if master and _is_half(x) else x.dtype for x in options["params"]}
    kernels = kernels_of(options, device_type, dtypes)
    if kernels == "fused":
        # They count in float32, loops in torch's default dtype where that is float64.
        states = (
            replace(each, dtype="float32") if each == StateSpec("step", (), "float64") else each
            for each in rule.states
        )
        rule = replace(rule, states=tuple(states))
    if not elements:
        return rule
    clones = clones_gradients(copies.optimizer, kernels == "lists")
    own = elements * dtype.itemsize if clones else 0
    taken = copies, parameter.shape or (1,), dtype  # masks of no dimension are read as flags
    match kernels:
        case "fused":
            sizes = (0, 0, own)
        case "lists":
            sizes = (0, 0, own + _extra_bytes(*taken, lists=True))
        case "loop":
            alone = _extra_bytes(*taken)
            sizes = (alone, _extra_bytes(*taken, count=2) - alone, own)
    return replace(rule, takes=UpdateBytes(*(-(-size // elements) for size in sizes)))


def _trial(
    copies: TrialCopies, shape: Sequence[int], dtype: torch.dtype
) -> tuple[tuple[StateSpec, ...], bool]:
    """Two steps on a parameter without data: the states that it gets, and whether its elements are mixed."""
    try:
        return _stepped(copies, shape, dtype)
    except TypeError:
        if len(shape):
            raise
    # Masks of no dimension are read as flags where a tensor is indexed by them (`sign[sign.gt(0)] = 1`).
    states, mixing = _stepped(copies, [1], dtype)
    return tuple(replace(s, shape=() if s.shape == (1,) else s.shape) for s in states), mixing


def _stepped(
    copies: TrialCopies, shape: Sequence[int], dtype: torch.dtype
) -> tuple[tuple[StateSpec, ...], bool]:
    copy, probe = copies.without_data(shape, dtype)
    kind, options = type(copies.optimizer).__name__, dict(copy.param_groups[0])
    observer, foreign = StepObserver(), is_foreign(copies.optimizer)
    states: dict[str, StateSpec] = {}
    # Twice: some states appear with the first step, some ops only with the second.
    for _ in range(steps_of_states(copies, len(shape)) if foreign else 2):
        probe.grad = torch.empty_like(probe)
        with observer:
            copy.step()
        states |= {each.name: each for each in _states(copy, probe)}
    changed = [
        name
        for name, value in copy.param_groups[0].items()
        if name not in options or not (value is options[name] or value == options[name])
    ]
    counters = find_counters(copies, len(shape)) if foreign and changed else ()
    for name in changed:
        if name not in {each.name for each in counters if each.of_group}:
            raise CaptureError(
                f"the optimizer {kind} cannot be captured: its step changes {name!r} of the "
                "parameter group; expected an update that looks at one parameter at a time, and numbers in the group "
                "that depend on themselves, as a counter does"
            )
    if observer.draws:
        raise CaptureError(
            f"the optimizer {kind} cannot be captured: its step draws random numbers "
            f"({observer.draws[0]}), and ranks that hold the same parameter would draw different ones; expected an "
            "update that draws none. Noise may be drawn in the loss function, or added to the model between steps"
        )
    return tuple(states.values()), bool(observer.mixing)


def _extra_bytes(
    copies: TrialCopies,
    shape: Sequence[int],
    dtype: torch.dtype,
    count: int = 1,
    lists: bool = False,
) -> int:
    """The most bytes that a step takes for `count` equal parameters beside their states."""
    copy, *probes = copies.without_data(shape, dtype, count)
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


def _is_half(parameter: torch.Tensor) -> bool:
    return parameter.dtype in (torch.float16, torch.bfloat16)


def _mark(value: Any) -> Any:
    plain = value is None or isinstance(value, int | float | str)
    return (type(value).__name__, value) if plain else id(value)


def _states(copy: Any, probe: torch.Tensor) -> tuple[StateSpec, ...]:
    found = []
    for key, value in copy.state.items():
        empty = value is None or (isinstance(value, dict) and not value)
        if key is not probe and not empty:
            raise of_no_parameter(copy, key)
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
