"""Trials of an optimizer's step: on copies of it, whose parameters have small values, or none and are watched.

Watched is which ops mix elements, draw numbers and hold memory; and which states an update keeps by its options.
"""

from __future__ import annotations

import math
import weakref
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves

from weft.capture.fx.private import DispatchMode
from weft.capture.optimizer_groups import Optimizers
from weft.capture.optimizers.attributes import attributes_for_copy, give_attributes, options_of
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
        group: whose options all groups of a copy have.
        put_on: attributes that the user has put on the parameter that those of copies stand for.
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


def step(optimizer: Any, parameters: Sequence[torch.nn.Parameter], phase: float) -> None:
    """A step of a copy, with gradients by phase that differ from parameter to parameter."""
    for place, each in enumerate(parameters):
        each.grad = small_values(each.dim(), phase - 7.0 * place)
    with torch.random.fork_rng(devices=[]):
        optimizer.step()


@final
class HeldBytes:
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

    Where the optimizer takes a number out of a tensor, any will do to go on: what such a number says of
    a whole parameter, as its norm, an op has mixed before. Where it branches on one, the other branch
    could keep other states: that is refused.
    """

    def __init__(self) -> None:
        super().__init__()
        self.mixing: list[str] = []
        self.draws: list[str] = []
        self.held = HeldBytes()

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
    """True where this is `x[mask] = number`, with a mask of the shape of x."""
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
