"""Trial runs of an optimizer's step, on copies whose parameters have small values or none.

They show which ops mix elements, draw numbers and hold memory; which states an update keeps for its options; and
which numbers in the optimizer count its steps.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final
from weakref import WeakKeyDictionary

import torch
from torch.utils._pytree import tree_leaves

from weft.capture.fx.private import DispatchMode
from weft.capture.optimizer_groups import Optimizers
from weft.capture.optimizers.attributes import (
    attributes_for_copy,
    attributes_of,
    give_attributes,
    options_of,
)
from weft.errors import UserError

# Steps of a trial: enough to see what is done every few steps.
TRIAL_STEPS = 12
# Ops that move no value from one element to another, beside those that torch tags as pointwise.
_ELEMENTWISE = frozenset(
    (
        *("_to_copy", "alias", "clone", "copy_", "detach", "empty", "empty_like", "fill_"),
        *("full_like", "lift_fresh", "ones_like", "view_as_complex", "view_as_real", "zero_"),
        *("zeros", "zeros_like"),
    )
)


@final
@dataclass(frozen=True)
class TrialCopies:
    """Copies of the user's optimizer with other parameters, which share nothing that a step writes.

    Attributes:
        group: the group whose options all groups of a copy have.
        put_on: the user's attributes of the original parameter.
    """

    optimizer: torch.optim.Optimizer
    group: int
    put_on: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, *groups: Sequence[torch.nn.Parameter]) -> Any:
        copy = object.__new__(type(self.optimizer))
        # Schedulers put their own `step` on the instance.
        copy.__dict__.update({k: v for k, v in vars(self.optimizer).items() if k != "step"})
        copy.__dict__.update(attributes_for_copy(self.optimizer, tensors=True))
        copy.param_groups = []
        for probes in groups:
            for probe in probes:
                give_attributes(probe, self.put_on)
            options = options_of(self.optimizer.param_groups[self.group], tensors=True)
            options["params"] = list(probes)
            # Other implementations of the same update; they ask for devices that tensors without data
            # are not on.
            ways = ("fused", "foreach", "capturable")
            options.update({name: False for name in ways if name in options})
            copy.param_groups.append(options)
        copy.state = defaultdict(dict)
        return copy

    def without_data(self, shape: Sequence[int], dtype: torch.dtype, count: int = 1) -> Any:
        """A copy, and its parameters, equal and without data."""
        data = (torch.empty(shape, device="meta", dtype=dtype) for _ in range(count))
        probes = [torch.nn.Parameter(each) for each in data]
        return self(probes), *probes


def small_values(dims: int, phase: float) -> torch.Tensor:
    """A tensor for trials: 3 elements along each dimension, enough for any way of mixing them; others by phase."""
    count = 3**dims
    return torch.sin(torch.arange(count, dtype=torch.float32) + phase).reshape([3] * dims)


def small_parameter(dims: int, phase: float) -> torch.nn.Parameter:
    """A parameter of such values."""
    return torch.nn.Parameter(small_values(dims, phase))


def step(
    optimizer: Any, parameters: Sequence[torch.nn.Parameter], phase: float, scale: float = 1.0
) -> None:
    """A step of a copy, with gradients by phase that differ from parameter to parameter; `scale` is of all but one."""
    for place, each in enumerate(parameters):
        each.grad = small_values(each.dim(), phase - 7.0 * place) * (scale if place else 1.0)
    with torch.random.fork_rng(devices=[]):
        optimizer.step()


@final
class AliveBytes:
    """The bytes of the tensors that ops have made and that are alive."""

    def __init__(self) -> None:
        self.now = self.most = 0
        # The callback at the end of each storage, by the id of its Python object, which lives as long.
        self._alive: dict[int, weakref.ref[Any]] = {}

    def note(self, made: Iterable[Any], given: Iterable[Any]) -> None:
        """Note the results of an op; those in the memory of what it was given are not new."""
        old = {id(x.untyped_storage()) for x in given if isinstance(x, torch.Tensor)}
        for x in made:
            if not isinstance(x, torch.Tensor):
                continue
            storage = x.untyped_storage()
            key, size = id(storage), storage.nbytes()
            if key in old or key in self._alive:
                continue
            self._alive[key] = weakref.ref(storage, partial(self._gone, key, size))
            self.now += size
            self.most = max(self.most, self.now)

    def _gone(self, key: int, size: int, _: object) -> None:
        del self._alive[key]
        self.now -= size


@final
class StepObserver(DispatchMode):  # type: ignore[no-untyped-call]
    """Notes which ops on more than one element mix elements, and what they hold.

    If the optimizer reads a number from a tensor, any number will do to continue: an op on the
    whole parameter, such as a norm, was seen before. A branch on such a number is refused, because the other branch
    could keep other states.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixing: list[str] = []
        self.draws: list[str] = []
        self.held = AliveBytes()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default and args[0].is_meta:
            if args[0].dtype == torch.bool:
                raise TypeError("the step branches on the value of a tensor")
            return 1.0
        result = func(*args, **(kwargs or {}))
        self.held.note(tree_leaves(result), tree_leaves((args, kwargs)))
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.draws.append(str(func))
        name = func.overloadpacket.__name__
        elementwise = torch.Tag.pointwise in func.tags or name in _ELEMENTWISE
        if not elementwise and not _fills_where(name, args) and any(_size(arg) > 1 for arg in args):
            self.mixing.append(str(func))
        return result


def _fills_where(name: str, args: Sequence[Any]) -> bool:
    """True if this is `x[mask] = number`, with a mask of the shape of x."""
    if name not in ("index_put", "index_put_"):
        return False
    x, indices, value = args[:3]
    if len(indices) != 1 or indices[0] is None:
        return False
    mask = indices[0]
    return bool(mask.dtype == torch.bool and mask.shape == x.shape and value.numel() == 1)


def _size(arg: Any) -> int:
    if isinstance(arg, list | tuple):
        return max(map(_size, arg), default=0)
    return math.prod(arg.shape) if isinstance(arg, torch.Tensor) else 0


def states_kept(optimizer: torch.optim.Optimizer, group: int, options: Any) -> frozenset[str]:
    """The names of the states that a group's updates keep by these options; none where that is not to be seen."""
    parameter = next(iter(optimizer.param_groups[group]["params"]), None)
    if parameter is None:
        return frozenset()
    copy, probe = TrialCopies(optimizer, group).without_data(
        parameter.shape, torch.get_default_dtype()
    )
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
    """The states that updates keep, by the options that the groups had when the step was compiled."""

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
        for label, number, now in groups:
            then, place = self._first.setdefault(number, now), self._optimizers.place(number)
            other = [key for key in now if key in then and _flag(now[key]) != _flag(then[key])]
            plain = {each: then[each] for each in other}
            for key in other:
                more = states_kept(*place, {**plain, key: now[key]}) - states_kept(*place, plain)
                if more:
                    raise UserError(
                        f"{label}: {key!r} was {then[key]!r} when the step was compiled, and is {now[key]!r}: the "
                        f"update keeps {', '.join(sorted(more))} then, for which the program has no place; close the "
                        "program, weft.release(model, optimizer), and compile again"
                    )
        self._seen = flags


def _flag(option: Any) -> Any:
    """The part of an option that decides which states there are: whether it is 0, not how large."""
    return type(option).__name__ if isinstance(option, torch.Tensor) else bool(option)


# Numbers that the step of a user's optimizer changes in the optimizer or its groups, as it counts its calls.
#
# Each rank has a copy of the optimizer for each plan, which would count for itself. So before each step copies get the
# user's numbers, and after it these advance by a step of one more copy, on a small parameter: alike on every process.
# This holds for numbers that depend on themselves alone, whatever is updated; trials show which do.


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


def find_counters(copies: TrialCopies, dims: int) -> frozenset[StepCounter]:
    """The numbers that steps change independently of all else; from now on they are known as counters.

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
    """Let the counters of an optimizer of the user's continue, once its parameters are updated on all ranks."""
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
