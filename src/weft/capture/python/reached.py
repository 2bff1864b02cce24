"""Objects that the user's functions see beside their arguments: globals, closures, owners of bound methods."""

from __future__ import annotations

import dis
import types
from collections.abc import Iterable, Iterator
from functools import cache, partial
from typing import Any

from torch import nn

from weft.files import in_library, installed, standard

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "STORE_NAME")
# Attributes of global tensors that are weft's, which plain ones do not have.
OF_GLOBAL = frozenset(["spec", "locals", "shares", "hold", "origin", "keeps_gradient"])


def user_functions(function: Any, model: nn.Module) -> list[types.FunctionType]:
    """The user's own functions that a step may run: the loss function, forwards, hooks, and what they call by name."""
    classes = dict.fromkeys(type(module) for module in model.modules())
    own = (value for module in model.modules() for value in vars(module).values())
    waiting = [function, *(each.forward for each in classes)]
    waiting += [each for each in own if isinstance(each, types.FunctionType | types.MethodType)]
    waiting += hooks_of(model)
    found: dict[int, types.FunctionType] = {}
    while waiting:
        plain = plain_function(waiting.pop())
        if plain is None or id(plain) in found or not is_users(plain):
            continue
        found[id(plain)] = plain
        waiting += [
            each for each in _named_by(plain, classes) if isinstance(each, types.FunctionType)
        ]
    return list(found.values())


def _named_by(function: types.FunctionType, classes: Iterable[type]) -> list[Any]:
    """The values that a function may mean by its names: globals, closures, attributes of classes and of modules."""
    names = list(names_in(function.__code__))
    seen = [space.get(name) for space, name in globals_of(function)]
    seen += [cell.cell_contents for _, cell in cells_of(function)]
    seen += [vars(each).get(name) for each in classes for name in names]
    modules = [each for each in seen if isinstance(each, types.ModuleType)]
    return seen + [vars(each).get(name) for each in modules for name in names]


def hooks_of(model: nn.Module) -> list[Any]:
    """The user's hooks on a model's modules and parameters (private attributes of theirs)."""
    found: list[Any] = []
    for owner in (*model.modules(), *model.parameters()):
        for name in MODULE_HOOKS:
            hooks = getattr(owner, name, None)
            found += hooks.values() if isinstance(hooks, dict) else []
    return [each for each in found if is_users(each)]


def bound_to(function: Any) -> Iterator[Any]:
    """The objects that a call of a function is given by itself: of a method, of partial arguments."""
    while isinstance(function, partial):
        yield from (*function.args, *function.keywords.values())
        function = function.func
    if not isinstance(function, types.FunctionType):
        yield getattr(function, "__self__", function)


def plain_function(function: Any) -> types.FunctionType | None:
    """The function that a call runs, below partials, methods and objects that can be called."""
    while isinstance(function, partial):
        function = function.func
    below = (getattr(function, name, None) for name in ("__func__", "__wrapped__"))
    for one in (function, type(function).__call__, *below):
        if isinstance(one, types.FunctionType):
            return one
    return None


def globals_of(function: types.FunctionType) -> list[tuple[dict[str, Any], str]]:
    """The globals that a function of the user's reads or writes: their dict, and the name."""
    if standard(function.__code__.co_filename):
        return []
    return [(function.__globals__, name) for name in _globals_in(function.__code__)]


def cells_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The variables of a function's closure that have a value, by name."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, cell) for name, cell in pairs if _has_content(cell)]


def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of attributes, and the texts, that a function names, with those of functions inside it."""
    own = {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    return frozenset(own).union(*(names_in(each) for each in _inner(code.co_consts)))


def texts_in(code: types.CodeType) -> frozenset[str]:
    """The texts that a function names and that could be names, with those of functions inside it."""
    own = frozenset(x for x in code.co_consts if isinstance(x, str) and x.isidentifier())
    return own.union(*(texts_in(each) for each in _inner(code.co_consts)))


def asked_in(code: types.CodeType) -> frozenset[str]:
    """The texts that a function which asks for attributes by `getattr` or `hasattr` names, with those inside it."""
    own = code.co_consts if not {"getattr", "hasattr"}.isdisjoint(code.co_names) else ()
    names = frozenset(each for each in own if isinstance(each, str) and each.isidentifier())
    return names.union(*(asked_in(each) for each in _inner(code.co_consts)))


@cache
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    own = [each.argval for each in dis.get_instructions(code) if each.opname in _GLOBALS]
    inner = [name for each in _inner(code.co_consts) for name in _globals_in(each)]
    return tuple(dict.fromkeys([*own, *inner]))


def _inner(constants: Iterable[Any]) -> Iterator[types.CodeType]:
    return (each for each in constants if isinstance(each, types.CodeType))


def is_users(function: Any) -> bool:
    """True where a function is the user's own, not of a library that is installed."""
    plain = plain_function(function)
    if plain is None:
        return False
    file = plain.__code__.co_filename
    return not in_library(file) and not installed(file)


def _has_content(cell: Any) -> bool:
    try:
        return cell.cell_contents is not _has_content  # true whenever there is one
    except ValueError:
        return False


def user_attributes(tensor: Any) -> dict[str, Any]:
    """The attributes that the user has put on a tensor, such as a weight decay of its own."""
    return {
        name: value
        for name, value in vars(tensor).items()
        if name not in OF_GLOBAL and not name.startswith("_")
    }
