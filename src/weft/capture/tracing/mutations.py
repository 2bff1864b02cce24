"""The places that a step may write to, put back after a run: of the model, and of all that the loss function names."""

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

# How far from the model and the loss function places are looked for, and in how large containers.
_DEPTH, _MANY = 4, 10_000
_CONTAINERS = (dict, list, set, deque)
# Attributes of a module in which its parts are.
_PARTS = ("_modules", "_parameters", "_buffers")
# No step writes into the classes of these.
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
    """On exit, also after an error, restore everything that `model` and `function` hold.

    Put back are attributes of modules and containers in them; variables of closures, globals, attributes of classes
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
    """All places that a step may write to, with their content before it."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        functions = user_functions(function, model)
        self._variables = [
            Guard(space, name, space.get(name, MISSING), f"the global {name}")
            for f in functions
            for space, name in globals_of(f)
        ]
        self._variables += [
            Guard(
                AttributeRead(cell),
                "cell_contents",
                cell.cell_contents,
                f"{name} in the closure of {f.__qualname__}",
            )
            for f in functions
            for name, cell in cells_of(f)
        ]
        self._bound = list(bound_to(function))
        named = [*self._bound, *(each.value for each in self._variables), *functions]
        self._owners = [(owner, dict(vars(owner))) for owner in _owners(named)]
        self._modules = list(model.named_modules())
        self._own = _reachable_containers([model])
        self._others = _reachable_containers([value for _, value in self._places()])

    def kept(self) -> dict[int, str]:
        """Tensors without data that are kept outside of the model: the names of their places, by id.

        Places in containers of its modules are included; `PythonRecorder.caches` knows attributes of modules.
        """
        found: dict[int, str] = {}
        places = list(self._places())
        if not any(holds_fakes(container) for container, _ in self._others):
            places = [(text, value) for text, value in places if holds_fakes(value)]
        spaces = {id(x) for _, each in self._modules for x in (vars(each), each._buffers)}
        if any(holds_fakes(each) for each, _ in self._own if id(each) not in spaces):
            for path, module in self._modules:
                tensors = {**module._parameters, **module._buffers}.items()
                inner = [("", vars(module))]
                inner += [(f"{x}.", user_attributes(y)) for x, y in tensors if y is not None]
                places += [
                    (f"{path}.{where}{name}".removeprefix("."), value)
                    for where, space in inner
                    for name, value in space.items()
                    if _may_hold(value) and name not in _PARTS
                ]
        for text, value in places:
            for each in (value, *(container for container, _ in _reachable_containers([value]))):
                found.update({id(x): text for x in _fakes_in(each) if id(x) not in found})
        return found

    @contextmanager
    def lent(self, stand_ins: Mapping[int, torch.Tensor]) -> Iterator[None]:
        """Within the context, stand-ins are in place of the model's tensors outside of the model, too.

        There the user's code may look for them, as with `p is head.weight`, or a dict by parameters.

        Args:
            stand_ins: by the id of the tensors that they stand for.
        """
        own = {id(container) for container, _ in self._own}
        outside = [each for each, _ in self._others if id(each) not in own]
        # For the model's own, values are lent by `weft.capture.tracing.replaced_tensors`, and keys here.
        outside += [
            x for x, _ in self._own if isinstance(x, dict) and any(id(k) in stand_ins for k in x)
        ]
        tensors = [x for each in outside for x in _parts(each) if id(x) in stand_ins]
        back = {id(stand_ins[id(x)]): x for x in tensors}
        ids = {id(stand_in): key for key, stand_in in stand_ins.items()}
        with ExitStack() as stack:
            for each in outside:
                if any(id(x) in stand_ins for x in _parts(each)):
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

    def _places(self) -> Iterator[tuple[str, Any]]:
        """Everything that is named outside of the model, as it is now."""
        for owner, _ in self._owners:
            for name, value in list(vars(owner).items()):
                yield f"{owner.__qualname__}.{name}", value
        for each in self._variables:
            yield each.text, each.value_now
        for each in self._bound:
            yield type(each).__name__, each
        for owner, _ in self._owners:
            for each in (owner, *vars(owner).values()):
                plain = getattr(each, "__func__", each)
                if isinstance(plain, types.FunctionType):
                    for value in (
                        *(plain.__defaults__ or ()),
                        *(plain.__kwdefaults__ or {}).values(),
                    ):
                        yield f"a default argument of {plain.__qualname__}", value

    def put_back(self, everything: bool) -> None:
        """Put back the content of before: in the model all, elsewhere where fakes are now, or `everything`."""
        own = {id(container) for container, _ in self._own}
        for container, content in (*self._own, *self._others):
            same = len(container) == len(content) and all(
                map(is_, _parts(container), _parts(content))
            )
            if not same and (everything or id(container) in own or holds_fakes(container)):
                container.clear()
                add = container.extend if isinstance(container, list | deque) else container.update
                add(content)
        for owner, before in self._owners:
            names = {**before, **vars(owner)} if everything else dict(vars(owner))
            for name in names:
                then, now = before.get(name, MISSING), vars(owner).get(name, MISSING)
                if now is then or not (everything or holds_fakes(now)):
                    continue
                if then is MISSING:
                    delattr(owner, name)
                else:
                    setattr(owner, name, then)
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
    """Put others in place of the values and keys in a container, by the ids of these; the order stays."""
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


def holds_fakes(value: Any) -> bool:
    """True if a value is, or a container holds, a tensor without data or a stand-in for a number."""
    return next(_fakes_in(value), None) is not None


def _fakes_in(value: Any, depth: int = _DEPTH) -> Iterator[Any]:
    """The tensors without data, and the stand-ins for numbers, that a value is or a container holds."""
    if stands_in(value):
        yield value
    elif depth and isinstance(value, (*_CONTAINERS, tuple)) and len(value) < _MANY:
        for part in list(value.values() if isinstance(value, dict) else value):
            yield from _fakes_in(part, depth - 1)


def _owners(named: Sequence[Any]) -> list[Any]:
    """The user's functions and classes among the values that a step names, and the classes of its objects."""
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


def _reachable_containers(roots: Sequence[Any]) -> list[tuple[_Container, Any]]:
    """Every container below `roots` that a step may write to, attributes as dicts, each once and with a copy of it."""
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
    return [(x, dict(x) if isinstance(x, dict) else list(x)) for x in found.values()]


def _may_hold(each: Any) -> bool:
    """True if a step can put something into it: a container, or an object of a user's class."""
    if isinstance(each, _CONTAINERS):
        return True
    if isinstance(each, type | types.ModuleType | types.FunctionType | torch.Tensor):
        return False
    if type(each).__module__.startswith(_SHARED):
        return False
    return isinstance(getattr(each, "__dict__", None), dict)
