"""A step of an optimizer on tensors without data, watched: which ops mix elements, draw numbers, hold memory.

Also, which states an update keeps by options that are changed between steps, and whether a program has these.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch.utils._pytree import tree_leaves

from weft.capture.fx.private import DispatchMode
from weft.capture.optimizers.groups import Optimizers
from weft.capture.optimizers.kernels import HeldBytes, copy_for
from weft.errors import UserError

# Ops that move no value from one element to another, beside those that torch tags as pointwise.
_ELEMENTWISE = frozenset(
    (
        "_to_copy",
        "alias",
        "clone",
        "copy_",
        "detach",
        "empty",
        "empty_like",
        "fill_",
        "full_like",
        "lift_fresh",
        "ones_like",
        "view_as_complex",
        "view_as_real",
        "zero_",
        "zeros",
        "zeros_like",
    )
)


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
        mixes = not _is_elementwise(func) and not _fills_where(func, args)
        if mixes and any(_size(arg) > 1 for arg in args):
            self.mixing.append(str(func))
        return result


def _is_elementwise(op: Any) -> bool:
    return torch.Tag.pointwise in op.tags or op.overloadpacket.__name__ in _ELEMENTWISE


def _fills_where(op: Any, args: Sequence[Any]) -> bool:
    """True where this is `x[mask] = number`, with a mask of the shape of x."""
    if op.overloadpacket.__name__ not in ("index_put", "index_put_"):
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
