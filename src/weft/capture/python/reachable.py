"""Objects that the user's functions see beside their arguments, by their code: globals, closures, keys of dicts."""

from __future__ import annotations

import dis
import re
import sys
import types
from collections.abc import Iterable, Iterator, Sequence
from functools import cache, partial
from itertools import takewhile
from typing import Any, final

from torch import nn

from weft.files import in_library, installed, standard

MODULE_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBALS = ("LOAD_GLOBAL", "STORE_GLOBAL", "LOAD_NAME", "STORE_NAME")
# A function that names one of these may read any global that is in its code or texts.
_BY_TEXT = frozenset(["globals", "eval", "exec", "modules", "import_module", "__import__"])
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
        if plain is None or id(plain) in found or not is_user_code(plain):
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
    return [each for each in found if is_user_code(each)]


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


def imported_by(function: types.FunctionType) -> list[types.ModuleType]:
    """The modules that a function imports itself, relative ones too, or names in texts as in `import_module("x")`."""
    steps = (step for each in codes_in(function.__code__) for step in dis.get_instructions(each))
    names = {step.argval for step in steps if step.opname == "IMPORT_NAME"}
    if not (texts := names_in(function.__code__)).isdisjoint(_BY_TEXT):
        names |= texts
    packages = (function.__globals__.get("__package__") or "").split(".")
    above = ["", *(".".join(packages[: end + 1]) + "." for end in range(len(packages)))]
    # `from . import x` names no module: the package itself.
    full = dict.fromkeys((parent + name).rstrip(".") for parent in above for name in sorted(names))
    modules = map(sys.modules.get, full)
    return [each for each in modules if each is not None]


def cells_of(function: types.FunctionType) -> list[tuple[str, Any]]:
    """The variables of a function's closure that have a value, by name."""
    pairs = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return [(name, cell) for name, cell in pairs if _has_content(cell)]


@cache
def codes_in(code: types.CodeType) -> tuple[types.CodeType, ...]:
    """The code of a function, and of those inside it."""
    inner = (each for each in code.co_consts if isinstance(each, types.CodeType))
    return code, *(below for each in inner for below in codes_in(each))


def names_in(code: types.CodeType) -> frozenset[str]:
    """The names of attributes, and the texts, that a function names, with those of functions inside it."""
    names = {name for each in codes_in(code) for name in (*each.co_names, *each.co_consts)}
    return frozenset(name for name in names if isinstance(name, str))


def texts_in(code: types.CodeType) -> frozenset[str]:
    """The texts that a function names and that could be names, with those of functions inside it."""
    texts = {text for each in codes_in(code) for text in each.co_consts if isinstance(text, str)}
    return frozenset(filter(str.isidentifier, texts))


def getattr_names(code: types.CodeType) -> frozenset[str]:
    """The texts that a function which asks for attributes by `getattr` or `hasattr` names, with those inside it."""
    texts: set[Any] = set()
    for each in codes_in(code):
        if not {"getattr", "hasattr"}.isdisjoint(each.co_names):
            texts |= {text for text in each.co_consts if isinstance(text, str)}
    return frozenset(filter(str.isidentifier, texts))


@cache
def _globals_in(code: types.CodeType) -> tuple[str, ...]:
    steps = (step for each in codes_in(code) for step in dis.get_instructions(each))
    names = [step.argval for step in steps if step.opname in _GLOBALS]
    if not (texts := names_in(code)).isdisjoint(_BY_TEXT):
        names += sorted({word for text in texts for word in re.findall(r"\w+", text)})
    return tuple(dict.fromkeys(names))


def is_user_code(function: Any) -> bool:
    """True if a function is the user's own, not of a library that is installed."""
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


# Instructions to skip between the ones that matter.
_NOISE = frozenset(
    ["CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "COPY", "DUP_TOP", "DUP_TOP_TWO"]
)
_SUBSCRIPTS = frozenset(["BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"])
# Methods of dicts that read no more than the item under the key that they are given.
_OF_ONE_KEY = frozenset(["get", "pop", "setdefault", "__getitem__"])
_END = dis.Instruction(*[None] * len(dis.Instruction._fields))  # type: ignore[arg-type]


@final
class Keys:
    """The places that the functions of a step read, by the last name of each: a variable, an attribute, a text as key.

    From a dict that the code indexes only by literal keys, only the items under these keys are read. Any other way of
    reading it (`items()`, a loop, a key that is computed, handing the dict on) may read all of it.
    """

    def __init__(self) -> None:
        self._loaded: set[str] = set()
        self._opened: set[str] = set()

    def add(self, code: types.CodeType) -> None:
        """One more function of the step."""
        loaded, opened = _loads_in(code)
        self._loaded |= loaded
        self._opened |= opened

    def written(self, name: str | None) -> bool:
        """True if a dict in a place of this name is read by keys that are in the code, and in no other way."""
        return name in self._loaded and name not in self._opened

    def __len__(self) -> int:
        return len(self._loaded) + len(self._opened)


@cache
def _loads_in(code: types.CodeType) -> tuple[frozenset[str], frozenset[str]]:
    """The places that a function and those inside it read; and those of which a dict may be read under any key."""
    loaded, opened = set[str](), set[str]()
    # Where what is in one place is put in another.
    renamed = set[tuple[str, str]]()
    for each in codes_in(code):
        steps = [step for step in dis.get_instructions(each) if step.opname not in _NOISE]
        steps += [_END] * 3
        for place in range(len(steps) - 3):
            names, after = _loaded(steps, place)
            loaded.update(names)
            opened.update(names[:-1])  # another value is loaded behind these
            if names and not _by_written_key(steps, place, after):
                others = _stored(steps[after:])
                renamed.update((names[-1], other) for other in others)
                opened.update(() if others else names[-1:])
    while more := {name for name, other in renamed if other in opened} - opened:
        opened |= more
    return frozenset(loaded), frozenset(opened)


def _loaded(steps: Sequence[dis.Instruction], place: int) -> tuple[tuple[str, ...], int]:
    """The names of the places that an instruction loads, and the number of the instruction after it."""
    step = steps[place]
    if step.opname == "LOAD_CONST":
        item = isinstance(step.argval, str) and _subscript(steps[place + 1])
        return ((step.argval,), place + 2) if item else ((), place)
    if step.opname is None or "LOAD_" not in step.opname:
        return (), place
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return tuple(each for each in names if isinstance(each, str)), place + 1


def _subscript(step: dis.Instruction) -> bool:
    return step.opname in _SUBSCRIPTS or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _by_written_key(steps: Sequence[dis.Instruction], place: int, after: int) -> bool:
    """True if what is loaded at `place` is asked for an item under a written key, or for no item."""
    first, second = steps[after], steps[after + 1]
    if first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        one = first.argval in _OF_ONE_KEY and second.opname == "LOAD_CONST"
        return one or not hasattr(dict, first.argval)
    if first.opname == "CONTAINS_OP":
        return place > 0 and steps[place - 1].opname == "LOAD_CONST"
    return first.opname == "POP_TOP" or (first.opname == "LOAD_CONST" and _subscript(second))


def _stored(steps: Iterable[dis.Instruction]) -> list[str]:
    """The names under which a value is kept at once."""
    stores = takewhile(lambda step: (step.opname or "").startswith("STORE_"), steps)
    names = [step.argval for step in stores]
    return names if all(isinstance(name, str) for name in names) else []
