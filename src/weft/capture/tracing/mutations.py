"""The places that a step may write to, put back after a run: of the model, and of what the loss function names."""

from __future__ import annotations

import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from operator import is_
from typing import Any, TypeAlias, final

import torch
from torch import nn

from weft.capture.python.caches import stands_in
from weft.capture.python.reachable import (
    bound_to,
    cells_of,
    globals_of,
    user_attributes,
    user_functions,
)
from weft.capture.python_guards import MISSING, AttributeRead, Guard

# How far from the model and the loss function it is looked for what they may write, and in how large containers.
_DEPTH, _MANY = 4, 10_000
_CONTAINERS = (dict, list, set, deque)
# Attributes of a module in which its parts are.
_PARTS = ("_modules", "_parameters", "_buffers")
# Into whose classes no step writes.
_LIBRARIES = frozenset(
    ["torch", "builtins", "weft", "types", "collections", "numpy", "typing", "abc"]
)
# Objects of these are other threads' too.
_SHARED = ("queue", "threading", "multiprocessing", "concurrent", "asyncio", "torch.utils.data")
_Container: TypeAlias = "dict[Any, Any] | list[Any] | set[Any] | deque[Any]"


@contextmanager
def mutations_undone(
    model: nn.Module, function: Callable[..., Any], everything: bool = False
) -> Iterator[MutableState]:
    """Afterwards, errors included, all that `model` and `function` hold is what it was before.

    Restored are: attributes of modules and containers in them; variables of closures, globals, attributes of classes
    and functions, and other containers where a tensor without data is now (a cache, a list of losses).

    Args:
        model, function: of a step.
        everything: for a step that runs with data: containers and globals get back whatever was
            there.
    """
    before = MutableState(model, function)
    try:
        yield before
    finally:
        before.put_back(everything)


@final
class MutableState:
    """The Python state that a step may write to, with its contents before the step."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        functions = user_functions(function, model)
        self._variables = [
            Guard(space, name, space.get(name, MISSING), f"the global {name}")
            for f in functions
            for space, name in globals_of(f)
        ]
        for f in functions:
            for name, cell in cells_of(f):
                text = f"{name} in the closure of {f.__qualname__}"
                self._variables.append(
                    Guard(AttributeRead(cell), "cell_contents", cell.cell_contents, text)
                )
        self._bound = list(bound_to(function))
        named = [*self._bound, *(each.value for each in self._variables)]
        self._owners = [(owner, dict(vars(owner))) for owner in _owners([*named, *functions])]
        roots = [value for text, value in self._places()]
        self._modules = list(model.named_modules())
        self._own = _kept([model])
        self._others = _kept(roots)

    def kept(self) -> dict[int, str]:
        """Tensors without data that places outside of the model hold now, by id: the names of the places.

        Places in containers of its modules are included; `PythonRecorder.caches` knows attributes of modules.
        """
        found: dict[int, str] = {}
        if not any(holds_fakes(container) for container, _ in self._others):
            places = [(text, value) for text, value in self._places() if holds_fakes(value)]
        else:
            places = list(self._places())
        spaces = {id(x) for _, each in self._modules for x in (vars(each), each._buffers)}
        if any(holds_fakes(each) for each, _ in self._own if id(each) not in spaces):
            places += self._contained()
        for text, value in places:
            for each in (value, *_reached([value])):
                found.update({id(x): text for x in _fakes_in(each) if id(x) not in found})
        return found

    @contextmanager
    def lent(self, stand_ins: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """While this lasts, stand-ins are in place of the model's tensors outside of the model, too.

        There the user's code may look for them, as with `p is head.weight`, or a dict by parameters.

        Args:
            stand_ins: by the id of what they stand for.
        """
        own = {id(container) for container, _ in self._own}
        outside = [each for each, _ in self._others if id(each) not in own]
        # For the model's own, values are lent by `weft.capture.tracing.replaced_tensors`, and keys here.
        outside += [
            x for x, _ in self._own if isinstance(x, dict) and any(id(k) in stand_ins for k in x)
        ]
        places = [each for each in outside if any(id(x) in stand_ins for x in _parts(each))]
        tensors = [x for each in places for x in _parts(each) if id(x) in stand_ins]
        back = {id(stand_ins[id(x)]): x for x in tensors}
        ids = {id(stand_in): key for key, stand_in in stand_ins.items()}
        with ExitStack() as stack:
            for each in places:
                stack.callback(_exchange, each, back)
                _exchange(each, stand_ins)
            for variable in self._variables:
                if id(variable.value) in stand_ins:
                    stack.callback(variable.put, variable.value)
                    variable.put(stand_ins[id(variable.value)])
                elif variable.name == "id" and variable.value is MISSING:
                    stack.callback(variable.space.pop, "id", None)
                    variable.put(lambda x: ids.get(id(x), id(x)))
            yield

    def _contained(self) -> Iterator[tuple[str, Any]]:
        """The containers and objects in attributes of the model's modules."""
        for path, module in self._modules:
            tensors = {**module._parameters, **module._buffers}
            spaces = [
                ("", vars(module)),
                *((f"{x}.", user_attributes(y)) for x, y in tensors.items() if y is not None),
            ]
            for where, space in spaces:
                for name, value in space.items():
                    if _may_hold(value) and name not in _PARTS:
                        yield f"{path}.{where}{name}".removeprefix("."), value

    def _places(self) -> Iterator[tuple[str, Any]]:
        """Everything that is named outside of the model, as it is now."""
        owners = [owner for owner, _ in self._owners]
        for owner in owners:
            for name, value in list(vars(owner).items()):
                yield f"{owner.__qualname__}.{name}", value
        for each in self._variables:
            yield each.text, each.value_now
        for each in self._bound:
            yield type(each).__name__, each
        yield from _defaults(owners)

    def put_back(self, everything: bool) -> None:
        """Put back what was there: in the model all, elsewhere where fakes are now, or `everything`."""
        for container, before in self._own:
            _put_back(container, before)
        for container, before in self._others:
            if everything or holds_fakes(container):
                _put_back(container, before)
        for owner, space in self._owners:
            _reset(owner, space, everything)
        for each in self._variables:
            now = each.value_now
            if each.value is not MISSING:
                each.put(each.value)
            elif now is not MISSING and (everything or holds_fakes(now)):
                del each.space[each.name]


def _parts(container: _Container) -> list[Any]:
    """All that a container holds, keys of a dict included."""
    return (
        [*container.keys(), *container.values()] if isinstance(container, dict) else list(container)
    )


def _exchange(container: Any, others: Mapping[int, Any]) -> None:
    """Put others in place of what a container holds, by the ids of that; the order stays."""
    if not any(id(x) in others for x in _parts(container)):
        return
    if isinstance(container, dict):
        items = [(others.get(id(k), k), others.get(id(x), x)) for k, x in container.items()]
        dict.clear(container)
        for key, value in items:
            dict.__setitem__(container, key, value)
    elif isinstance(container, set):
        parts = [others.get(id(x), x) for x in container]
        container.clear()
        container.update(parts)
    else:
        for place, value in enumerate(list(container)):
            container[place] = others.get(id(value), value)


def _kept(roots: Sequence[Any]) -> list[tuple[_Container, Any]]:
    """Every container that a step may write to below `roots`, and what it holds now."""
    return [(each, _copy(each)) for each in _reached(roots)]


def holds_fakes(value: Any) -> bool:
    """True where a value is, or a container holds, a tensor without data, or what stands for a number."""
    return next(_fakes_in(value), None) is not None


def _fakes_in(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The tensors without data, and what stands for numbers, that a value is or a container holds."""
    if stands_in(value):
        yield value
    elif depth and isinstance(value, (*_CONTAINERS, tuple)) and len(value) < _MANY:
        for part in list(value.values() if isinstance(value, dict) else value):
            yield from _fakes_in(part, depth - 1)


def _owners(named: Sequence[Any]) -> list[Any]:
    """The user's functions and classes among what a step names, and the classes of its objects."""
    found: dict[int, Any] = {}
    for each in named:
        if isinstance(each, types.FunctionType):
            found[id(each)] = each
            continue
        each = each.__self__ if isinstance(each, types.MethodType) else each
        for cls in each.__mro__ if isinstance(each, type) else type(each).__mro__:
            if cls.__module__.partition(".")[0] not in _LIBRARIES:
                found[id(cls)] = cls
    return list(found.values())


def _defaults(owners: Sequence[Any]) -> Iterator[tuple[str, Any]]:
    """The values of the default arguments of functions, those of classes included, with their name."""
    plain = (getattr(x, "__func__", x) for owner in owners for x in (owner, *vars(owner).values()))
    for each in plain:
        if isinstance(each, types.FunctionType):
            for value in (*(each.__defaults__ or ()), *(each.__kwdefaults__ or {}).values()):
                yield f"a default argument of {each.__qualname__}", value


def _reset(owner: Any, before: Mapping[str, Any], everything: bool) -> None:
    """Give a class or function its attributes back, where a tensor without data is now, or `everything`."""
    for name, value in dict(vars(owner)).items():
        then = before.get(name, MISSING)
        if value is then or not (everything or holds_fakes(value)):
            continue
        if then is MISSING:
            delattr(owner, name)
        else:
            setattr(owner, name, then)
    for name in before.keys() - vars(owner).keys() if everything else ():
        setattr(owner, name, before[name])


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
            for tensor in (*each.parameters(), *each.buffers()):
                put_on = user_attributes(tensor).values()
                waiting += [(x, _DEPTH) for x in put_on if _may_hold(x)]
        elif isinstance(each, _CONTAINERS):
            found[id(each)] = each
            parts = list(each.values() if isinstance(each, dict) else each)
            waiting += [(x, depth - 1) for x in parts if len(parts) < _MANY and _may_hold(x)]
        else:
            waiting.append((vars(each), depth))
    return list(found.values())


def _may_hold(each: Any) -> bool:
    """True where a step can put something into it: a container, or an object of a user's class."""
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
    same = len(container) == len(before) and all(map(is_, _parts(container), _parts(before)))
    if not same:
        container.clear()
        (container.extend if isinstance(container, list | deque) else container.update)(before)
