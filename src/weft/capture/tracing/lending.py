"""The user's model with stand-ins in place of its tensors, for the time of a trace; afterwards all is as it was."""

from __future__ import annotations

import types
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from weft.capture.numbers.changing import is_changing
from weft.capture.python.numbers import is_later
from weft.capture.python.reached import bound_to, cells_of, globals_of, user_functions
from weft.capture.python.spies import is_spy
from weft.capture.tracing.fx import is_fake
from weft.errors import CaptureError

# How far from the model and the loss function it is looked for what they may write, and in how large containers.
_DEPTH, _MANY = 4, 10_000
_CONTAINERS = (dict, list, set, deque)
_MISSING = object()
# Objects of these are other threads' too.
_SHARED = ("queue", "threading", "multiprocessing", "concurrent", "asyncio", "torch.utils.data")
_Container: TypeAlias = "dict[Any, Any] | list[Any] | set[Any] | deque[Any]"


@contextmanager
def restored(
    model: nn.Module, function: Callable[..., Any], everything: bool = False
) -> Iterator[Callable[[], None]]:
    """Afterwards, errors included, all that `model` and `function` hold is what it was before.

    That is: attributes of modules and containers in them; variables of closures, globals and other
    containers where a tensor without data is now (a cache, a list of losses).

    Args:
        model, function: of a step.
        everything: for a step that runs with data: containers and globals get back whatever was
            there.

    Gives a function that puts back at once what was where tensors without data, and numbers of them, are now, in
    dicts and attributes.
    """
    functions = user_functions(function, model)
    names = [(*each, each[0].get(each[1], _MISSING)) for f in functions for each in globals_of(f)]
    cells = [(cell, cell.cell_contents) for f in functions for _, cell in cells_of(f)]
    own = _kept([model])
    others = _kept([*bound_to(function), *(each[-1] for each in (*cells, *names))])

    def tensors_back() -> None:
        for container, before in (*own, *others):
            _without_fakes(container, before)

    try:
        yield tensors_back
    finally:
        for container, before in own:
            _put_back(container, before)
        for container, before in others:
            if everything or _holds_fakes(container):
                _put_back(container, before)
        for space, name, value in names:
            _set(space, name, value, everything)
        for cell, content in cells:
            cell.cell_contents = content


def _kept(roots: Sequence[Any]) -> list[tuple[_Container, Any]]:
    """Every container that a step may write to below `roots`, and what it holds now."""
    return [(each, _copy(each)) for each in _reached(roots)]


def _holds_fakes(container: _Container) -> bool:
    held = list(container.values() if isinstance(container, dict) else container)
    return any(any(map(stands, held)) for stands in (is_fake, is_spy, is_changing))


@final
@dataclass(frozen=True)
class Slot:
    """A place of the model: the module, its path, the name in it, and the stand-in there."""

    module: nn.Module
    path: str
    name: str
    stand_in: torch.Tensor

    @property
    def full_name(self) -> str:
        """As `state_dict` calls it."""
        return f"{self.path}.{self.name}" if self.path else self.name


@contextmanager
def lent(model: nn.Module, stand_ins: Mapping[int, torch.Tensor]) -> Iterator[tuple[Slot, ...]]:
    """While this lasts, stand-ins are in place of the tensors of `model`, under all their names.

    Where the user's code holds a tensor of the model by itself, torch computes with its stand-in
    too. Only inside of `restored`, which takes the stand-ins out again. Gives where they are.

    Args:
        model: of which every parameter and buffer has a stand-in.
        stand_ins: by the id of what they stand for.
    """
    slots = []
    for path, module in model.named_modules():
        for own in (module._parameters, module._buffers):
            held = {name: tensor for name, tensor in own.items() if tensor is not None}
            slots += [Slot(module, path, name, stand_ins[id(x)]) for name, x in held.items()]
            own.update({name: stand_ins[id(tensor)] for name, tensor in held.items()})
    with _Replacing(stand_ins):
        yield tuple(slots)


def write_replaced(slots: Sequence[Slot]) -> None:
    """Write what the step put in the place of buffers into the stand-ins that were there.

    Raises:
        CaptureError: naming what was replaced, when it is a parameter, has several names, or is
            replaced by another shape or dtype.
    """
    names = Counter(id(slot.stand_in) for slot in slots)
    for slot in slots:
        now = getattr(slot.module, slot.name, None)
        if now is slot.stand_in:
            continue
        if slot.name in slot.module._parameters or isinstance(now, nn.Parameter):
            raise _not_replaced(
                slot, "it is a parameter; write its new values into it, under torch.no_grad()"
            )
        if names[id(slot.stand_in)] > 1:
            raise _not_replaced(
                slot, "it has several names; write the new values into it with copy_"
            )
        if not isinstance(now, torch.Tensor) or _kind(now) != _kind(slot.stand_in):
            found = _kind(now) if isinstance(now, torch.Tensor) else repr(now)
            raise _not_replaced(
                slot, f"it was {_kind(slot.stand_in)} and is {found}; keep shape and dtype"
            )
        with torch.no_grad():
            slot.stand_in.copy_(now)


def _kind(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"


def _not_replaced(slot: Slot, reason: str) -> CaptureError:
    return CaptureError(f"the step puts another value in the place of {slot.full_name}: {reason}")


@final
class _Replacing(TorchFunctionMode):
    """Calls of torch's functions with tensors of the model are made with their stand-ins."""

    def __init__(self, stand_ins: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._stand_ins = stand_ins

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = {name: self._replaced(value) for name, value in (kwargs or {}).items()}
        return func(*[self._replaced(value) for value in args], **kwargs)

    def _replaced(self, value: Any) -> Any:
        if type(value) is list or type(value) is tuple:
            return type(value)(self._replaced(part) for part in value)
        found = self._stand_ins.get(id(value), value)
        if hasattr(type(found), "sbp"):  # a global tensor, which a package above defines
            raise TypeError(
                f"the step computes with a live tensor {list(found.shape)} of another compiled model, or with another "
                "global tensor. Expected tensors of the model and the batch: give both models as one, "
                'nn.ModuleDict({"model": …, "other": …}), and each program its optimizer'
            )
        return found


def _set(space: dict[str, Any], name: str, value: Any, everything: bool) -> None:
    """Give a global its value back; a tensor without data, or `everything`, is taken away where there was none."""
    if value is _MISSING:
        if name in space and (everything or is_fake(space[name]) or is_spy(space[name])):
            del space[name]
    elif space.get(name, _MISSING) is not value:
        space[name] = value


def _reached(roots: Sequence[Any]) -> list[_Container]:
    """Every container that a step may write to, once: attributes as dicts, and what lies in them."""
    found: dict[int, _Container] = {}
    waiting = [(each, _DEPTH) for each in roots if _may_hold(each)]
    seen: set[int] = set()
    while waiting:
        each, depth = waiting.pop()
        if id(each) in seen or not depth:
            continue
        seen.add(id(each))
        if isinstance(each, nn.Module):
            waiting += [(vars(module), _DEPTH) for module in each.modules()]
        elif isinstance(each, _CONTAINERS):
            found[id(each)] = each
            parts = list(each.values() if isinstance(each, dict) else each)
            waiting += [(x, depth - 1) for x in parts if len(parts) < _MANY and _may_hold(x)]
        else:
            waiting.append((vars(each), depth))
    return list(found.values())


def _may_hold(each: Any) -> bool:
    """True where a step can put something into the value: a container, or an object of a user's class."""
    if isinstance(each, _CONTAINERS):
        return True
    if isinstance(each, type | types.ModuleType | types.FunctionType | torch.Tensor):
        return False
    if type(each).__module__.startswith(_SHARED):
        return False
    return isinstance(getattr(each, "__dict__", None), dict)


def _copy(container: _Container) -> Any:
    return dict(container) if isinstance(container, dict) else list(container)


def _put_back(container: Any, before: Any) -> None:
    now = _copy(container)
    if isinstance(container, dict):
        same = now.keys() == before.keys() and all(now[name] is before[name] for name in now)
    else:
        same = len(now) == len(before) and all(map(_is, now, before))
    if not same:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(before)


def _without_fakes(container: Any, before: Any) -> None:
    """Give the keys of a dict under which is a tensor without data, or a number of one, back what was there."""
    if isinstance(container, dict):
        for name in [x for x, value in container.items() if is_fake(value) or is_later(value)]:
            if name in before:
                container[name] = before[name]
            else:
                del container[name]


def _is(one: Any, other: Any) -> bool:
    return one is other
