"""The walk over all of Python that a step may read: functions, variables, classes, containers, objects, tensors.

The value in each place is noted (numbers by value, other objects by identity), then the values inside it. From a dict
that the code reads by literal keys alone, only the items under these keys are noted.
"""

from __future__ import annotations

import argparse
import array
import configparser
import ctypes
import gc
import os
import types
from abc import ABC, abstractmethod
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from functools import cached_property, partial
from inspect import unwrap
from itertools import takewhile
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import nn

from weft.capture.python.reachable import (
    Keys,
    bound_to,
    cells_of,
    getattr_names,
    globals_of,
    imported_by,
    is_user_code,
    names_in,
    plain_function,
    texts_in,
    user_attributes,
)
from weft.capture.python.side_effects import position_of
from weft.capture.python.symbolic import is_symbolic
from weft.capture.python_guards import (
    FUNCTIONS,
    MISSING,
    PLAIN,
    AttributeRead,
    Guard,
    QueriedValue,
    is_plain,
    question_guard,
    size_guard,
)
from weft.files import users_module

# Up to which size all items of a container are noted, how many items of all, and how many containers deep.
_MANY, _ALL, _DEEP = 2000, 20_000, 20
# How many modules deep the names of a function are looked up: torch.nn.functional.relu.
_MODULES = 3
CONTAINERS = (dict, list, deque, set, frozenset, tuple)
_MAPPINGS = (UserDict, UserList, ChainMap, configparser.RawConfigParser)
# Objects of libraries that only hold what the user gives them.
HOLDERS = (types.SimpleNamespace, argparse.Namespace, *_MAPPINGS)
# Dicts whose methods read no more than those of a plain dict.
_PLAIN_DICTS = (dict, OrderedDict, defaultdict)
# A function that names these reads attributes of an object under names that it computes.
_BY_MADE_NAMES = frozenset(["vars", "__dict__", "getattr"])
# A function that names one of these may read the class of any object.
_BY_CLASS = frozenset(["type", "__class__"])
# Methods of a user's class that torch calls by itself.
_CALLED = ("forward", "backward", "setup_context", "jvp", "vjp", "vmap")
# Entries of an optimizer's groups beside hyperparameters.
_OF_GROUPS = ("params", "param_names", "initial_lr")
# Libraries whose classes are not watched.
_LIBRARIES = frozenset(["torch", "builtins", "weft", "types", "collections", "numpy"])
_VIEWS: tuple[type, ...] = (
    types.MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_WEAK = (WeakValueDictionary, WeakKeyDictionary, WeakSet)
# Their content is their bytes.
_BYTES = (bytearray, memoryview, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)


class Walk(ABC):
    """The places that a step may read, each with its value.

    Attributes:
        entries: all places that are to be compared before a step.
        beside: plain values under names that no function uses: compared only after the trace.
        keys: of dicts that the step's functions read.
        named: all names in these functions.
    """

    def __init__(self) -> None:
        self.entries: list[Guard] = []
        self.beside: list[Guard] = []
        self.keys = Keys()
        self.named: frozenset[str] = frozenset()
        self._asked: frozenset[str] = frozenset()
        self._added: set[tuple[int, Any]] = set()
        # Containers, kept alive, and what was known of the step's functions when their items were noted.
        self._walked: dict[int, tuple[Any, bool, tuple[int, int]]] = {}
        self._deep = self._noted = 0
        # Dicts in which looking up makes items, by id: with the keys that they had, and the user's name.
        self._making: dict[int, tuple[defaultdict[Any, Any], frozenset[Any], str]] = {}
        self._positions: dict[int, Guard] = {}
        self._functions: set[int] = set()
        # With the user's names of them.
        self._tensors: dict[int, tuple[torch.Tensor, str]] = {}
        # The user's classes that functions reach, and modules that are values; the names that were looked up in them.
        self._looked_up: dict[type | types.ModuleType, frozenset[str]] = {}
        # The classes of modules and objects that were there before the step.
        self._of_objects: set[type] = set()
        self._spaces: dict[type, Mapping[str, Any]] = {}

    @abstractmethod
    def module(self, module: nn.Module, text: str, inner: bool) -> None:
        """Note the attributes that are read of a module that was there before the step; `inner` of the model's own."""

    @abstractmethod
    def see(self, value: Any, text: str, users: bool = True) -> bool:
        """Note the attributes that are read of an object that was there before the step; False if none can be.

        Args:
            users: False for an object that a module of a library holds, of which plain values are noted.
        """

    def add(self, entry: Guard) -> None:
        """Watch a value."""
        if not is_symbolic(entry.value) and entry.key not in self._added:
            self._added.add(entry.key)
            self.entries.append(entry)

    def put(self, space: Any, name: Any, value: Any, text: str, written: bool = True) -> None:
        """Watch a value, and everything in it."""
        self.add(Guard(space, name, value, text))
        self.inside(value, text, name if isinstance(name, str) else None, written)

    def inside(self, value: Any, text: str, name: str | None = None, written: bool = True) -> None:
        """Watch everything in a value.

        Args:
            value: of any kind.
            text: the user's name of it.
            name: the last name that leads to it; None if it is reached without one.
            written: False if something on the way to it is not read by literal keys.
        """
        value = _shown(value)
        if callable(value) and not isinstance(value, type | nn.Module):
            self.function(value)
        if isinstance(value, torch.Tensor):
            self.on_tensor(value, text)
        elif isinstance(value, type | types.ModuleType):
            self._in_namespace(value)
        elif alone(value) or id(value) in self._positions:
            return
        elif position := position_of(value, text):
            self._positions[id(value)] = position
        elif isinstance(value, nn.Module):
            for path, each in value.named_modules():
                self.module(each, f"{text}.{path}" if path else text, inner=False)
        elif isinstance(value, ReferenceType):
            self.add(question_guard(value, lambda: value() is None, text))
            self.inside(value(), text, name, written)
        elif not self._of_libraries(value, text):
            self._in_object(value, text, name, written)

    def _of_libraries(self, value: Any, text: str) -> bool:
        """Watch an object of Python, numpy or torch whose state is not an attribute; False if it is none of them."""
        if isinstance(value, np.ndarray | array.array):
            self.add(question_guard(value, value.tobytes, f"the values of {text}"))
        elif isinstance(value, _BYTES):
            self.add(question_guard(value, lambda: bytes(value), text))
        elif isinstance(value, ContextVar):
            held = partial(_in_context, value)
            self.add(question_guard(value, held, text, equal=False))
            self.inside(held(), text)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            rates = lambda: list(value.get_last_lr())  # noqa: E731
            self.add(question_guard(value, rates, f"the learning rates of {text}"))
        elif isinstance(value, torch.optim.Optimizer):
            for number, group in enumerate(value.param_groups):
                users = group.keys() - {*value.defaults, *_OF_GROUPS}
                for name in sorted((self.named & group.keys() - {"params"}) | users):
                    self.put(group, name, group[name], f"{text}.param_groups[{number}][{name!r}]")
            own = vars(value)
            for name in sorted(self.named & own.keys() - {"defaults", "state", "param_groups"}):
                if not name.startswith("_") and not isinstance(own[name], FUNCTIONS):
                    self.put(own, name, own[name], f"{text}.{name}")
        else:
            return False
        return True

    def _in_object(self, value: Any, text: str, name: str | None, written: bool) -> None:
        """Watch the items of a container; of an object of the user's the attributes read, of others those named."""
        reads_noted = self.see(value, text)
        container = isinstance(value, CONTAINERS)
        if reads_noted and has_own_reads(type(value)):  # which may pass by what is noted
            written = reads_noted = False
        if reads_noted and not container:
            return
        written = written and self._by_literal_keys(value, name)
        known = (len(self.named), len(self.keys))
        _, as_written, then = self._walked.get(id(value), (None, True, None))
        if self._deep < _DEEP and (then != known or not (written or not as_written)):
            self._walked[id(value)] = value, written, known
            self._deep += 1
            try:
                self._hold(value, text, written)
            finally:
                self._deep -= 1
        if not container and isinstance(getattr(value, "__dict__", None), dict):
            self._of_its_class(value, attributes(value), text)

    def _by_literal_keys(self, value: Any, name: str | None) -> bool:
        """True if only items under keys that are in the code are read of a container or object."""
        if isinstance(value, dict):
            literal = type(value) in _PLAIN_DICTS and self.keys.written(name)
        elif isinstance(value, HOLDERS):
            plain = not isinstance(value, _MAPPINGS)
            literal, value = plain and self.named.isdisjoint(_BY_MADE_NAMES), attributes(value)
        else:
            return True
        return literal and not self.named.isdisjoint(x for x in value if isinstance(x, str))

    def _hold(self, value: Any, text: str, written: bool) -> None:
        """Note the items of a container, or the attributes of an object of which reads are not noted."""
        if isinstance(value, dict | list | deque | set):
            self.add(size_guard(value, f"items of {text}"))
        if isinstance(value, dict):
            self._dict(value, text, written)
        elif isinstance(value, set | frozenset):
            self._set(value, text, written)
        elif isinstance(value, list | deque):
            held = dict(enumerate(value)) if len(value) <= _MANY else {}
            self._items(value, held, text + "[{!r}]", written)
        elif isinstance(value, tuple):
            for number, part in enumerate(value[:_MANY]):
                self.inside(part, f"{text}[{number}]", None, written)
        else:
            own, holder = attributes(value), isinstance(value, HOLDERS)
            if own and holder:
                self.add(size_guard(own, f"attributes of {text}"))
            opened = not written and (holder or has_own_reads(type(value)))
            self._items(own, own, text + ".{}", not opened)
            if opened:
                self.order(own, f"items of {text}")

    def _dict(self, held: dict[Any, Any], text: str, written: bool) -> None:
        self._items(held, held, text + "[{!r}]", written)
        if isinstance(held, defaultdict):
            self._making.setdefault(id(held), (held, frozenset(held), text))
            for name in sorted(self.named - held.keys()):
                self.add(Guard(held, name, MISSING, f"{text}[{name!r}]"))
        if not written:
            self.order(held, f"items of {text}")

    def _set(self, held: set[Any] | frozenset[Any], text: str, written: bool) -> None:
        if len(held) > _MANY:
            return
        if isinstance(held, set):
            members = QueriedValue(held, partial(frozenset, held))
            self.add(Guard(members, set, frozenset(held), text))
        for each in list(held):
            self.inside(each, f"a member of {text}", None, written)

    def _items(self, space: Any, held: Mapping[Any, Any], text: str, written: bool) -> None:
        """Note items: those under texts that nobody names only where keys are made, and there are not too many."""
        all_of_them = not written and len(held) <= _MANY and self._noted < _ALL
        for name, value in list(held.items()):
            where = text.format(name)
            if isinstance(name, str) and name not in self.named and not all_of_them:
                if isinstance(value, PLAIN) and not is_symbolic(value):
                    self.beside.append(Guard(space, name, value, where))
                continue
            self._noted += 1
            self.put(space, name, value, where, written)

    def order(self, held: dict[Any, Any], text: str) -> None:
        """Watch the order of items, which code that iterates over them sees."""
        if 1 < len(held) <= _MANY and is_plain(tuple(held)):
            keys = QueriedValue(held, partial(list, held))
            self.add(Guard(keys, list, list(held), f"the order of {text}"))

    def looked_up(self) -> list[Guard]:
        """Plain items that the step has made by looking them up: until they are there, the same is made again."""
        return [
            question_guard(
                None, partial(held.get, name, held[name]), f"{text}[{name!r}]", equal=False
            )
            for held, before, text in self._making.values()
            for name in [x for x in held if x not in before and is_plain(held[x])][:_MANY]
        ]

    def on_tensor(self, tensor: torch.Tensor, text: str) -> None:
        """Watch the attributes that the user has put on a tensor, and those that functions ask for there."""
        if id(tensor) in self._tensors:
            return
        self._tensors[id(tensor)] = tensor, text
        own, space = vars(tensor), AttributeRead(tensor)
        for key, value in user_attributes(tensor).items():
            self.put(space, key, value, f"{text}.{key}")
        for key in self._asked:
            if key not in own and not hasattr(torch.Tensor, key):
                self.add(Guard(space, key, MISSING, f"{text}.{key}"))

    # ------------------------------------------------------------------------------------ functions

    def function(self, function: Any) -> None:
        """Watch the names that a function of the user's uses, and the object and arguments that it is bound to."""
        if isinstance(function, types.MethodType | partial):
            for owner in bound_to(function):
                self.inside(owner, type(owner).__name__)
        plain = plain_function(function)
        while isinstance(function, partial):
            self.add(size_guard(function.keywords, "keywords of a partial"))
            for name, value in function.keywords.items():
                self.put(function.keywords, name, value, f"the keyword {name} of a partial")
            function = function.func
        if plain is None or id(plain) in self._functions or not is_user_code(plain):
            return
        self._functions.add(id(plain))
        title, code = plain.__qualname__, plain.__code__
        self.add(Guard(AttributeRead(plain), "__code__", code, f"the code of {title}"))
        if plain.__defaults__:
            text = f"the defaults of {title}"
            self.add(Guard(AttributeRead(plain), "__defaults__", plain.__defaults__, text))
        for name, value in (plain.__kwdefaults__ or {}).items():
            text = f"the default of {name} of {title}"
            self.add(Guard(plain.__kwdefaults__, name, value, text))
        self.know(code)
        for name in sorted(vars(plain).keys() - {"__wrapped__"}):
            self.put(vars(plain), name, vars(plain)[name], f"{title}.{name}")
        if "initial_seed" in names_in(code):
            self.add(question_guard(None, torch.initial_seed, "torch.initial_seed()"))
        self._named_by(plain, self._variables(plain))

    def know(self, code: types.CodeType) -> None:
        """The step may run this code."""
        self.named |= names_in(code)
        self._asked |= getattr_names(code)
        self.keys.add(code)

    def _variables(self, function: types.FunctionType) -> list[Any]:
        """Watch the globals of a function, its closure and the classes above its own; the values of the first two."""
        title, code = function.__qualname__, function.__code__
        names = [(space, name) for space, name in globals_of(function) if name in space]
        for space, name in names:
            self.put(space, name, space[name], f"the global {name}")
        cells = cells_of(function)
        for name, cell in cells:
            text = f"{name} in the closure of {title}"
            self.add(Guard(AttributeRead(cell), "cell_contents", cell.cell_contents, text))
            self.inside(cell.cell_contents, text, name)
            if name == "__class__" and "super" in code.co_names:
                for base in cell.cell_contents.__bases__:
                    for each in sorted(names_in(code)):
                        self.of_class(base, each)
        return [*(space[name] for space, name in names), *(cell.cell_contents for _, cell in cells)]

    def _named_by(self, function: types.FunctionType, seen: Sequence[Any]) -> None:
        """Watch what a function names in modules, classes and the environment, and its defaults.

        Args:
            function: the user's.
            seen: the values of its globals and closures.
        """
        names = names_in(function.__code__)
        for value in (*seen, *imported_by(function)):
            if isinstance(value, types.ModuleType):
                self._in_module(value, names)
            elif isinstance(value, type):
                self._in_class(value, names)
        if any(value is x for value in seen for x in (os, os.environ, os.getenv)):
            for text in sorted(texts_in(function.__code__)):
                # Private attribute: the dict that `os.environ` reads.
                held, key = os.environ._data, os.environ.encodekey(text)  # type: ignore[attr-defined]
                self.add(Guard(held, key, held.get(key, MISSING), f"os.environ[{text!r}]"))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.inside(value, f"a default of {function.__qualname__}")
        # Classes and modules are passed on as arguments, so that any function may use the names in them.
        by_class = () if self.named.isdisjoint(_BY_CLASS) else self._of_objects
        for space in (*self._looked_up, *by_class):
            self._in_namespace(space)

    def _in_module(
        self, module: types.ModuleType, names: frozenset[str], depth: int = _MODULES
    ) -> None:
        """Watch some names in a module of Python; in a library's, those of functions."""
        own, users = vars(module), users_module(module.__name__)
        if not depth or module.__name__.partition(".")[0] == "weft":
            return
        for name in sorted(names & own.keys()):
            value, text = own[name], f"{module.__name__}.{name}"
            if isinstance(value, types.ModuleType):
                self._in_module(value, names, depth - 1)
            elif users or isinstance(value, FUNCTIONS):
                self.add(Guard(own, name, value, text))
            if users and isinstance(value, type):
                self._in_class(value, names)
            elif users:
                self.inside(value, text, name)

    # -------------------------------------------------------------------------------------- classes

    def class_of_object(self, cls: type) -> None:
        """Watch the names in the class of an object, where a function may ask for its class."""
        self._of_objects.add(cls)
        if not self.named.isdisjoint(_BY_CLASS):
            self._in_namespace(cls)

    def _in_namespace(self, space: type | types.ModuleType) -> None:
        """Watch all names of the step's functions in a class or module of the user's."""
        if self._looked_up.get(space) == self.named:
            return
        if isinstance(space, type):
            self._in_class(space, self.named)
        elif users_module(space.__name__):
            self._looked_up[space] = self.named
            self._in_module(space, self.named)

    def _in_class(self, cls: type, names: frozenset[str]) -> None:
        """Watch some names in a class of the user's."""
        if not users_module(cls.__module__):
            return
        if type(cls) is not type:
            self._in_class(type(cls), names)
        self._looked_up[cls] = self._looked_up.get(cls, frozenset()) | names
        for name in sorted(names.intersection(*[{x for each in cls.__mro__ for x in vars(each)}])):
            self.read_of(cls, name)
            self.of_class(cls, name)
        made = not issubclass(cls, nn.Module)
        self.called(cls, lambda name: name in _CALLED or (made and name.startswith("__")))

    def _of_its_class(self, value: Any, own: dict[str, Any], text: str) -> None:
        """Watch the names in the class of a library's object that functions use, and that the object has none."""
        cls = type(value)
        if cls.__module__.partition(".")[0] in _LIBRARIES:
            return
        seen = {name for each in cls.__mro__[:-1] for name in vars(each).keys() & self.named}
        for name in sorted(seen - own.keys()):
            found = self.of_class(cls, name)
            if not isinstance(found, FUNCTIONS) and not hasattr(type(found), "__set__"):
                self.add(Guard(own, name, MISSING, f"{text}.{name}"))
        for name in sorted(self._asked - seen - own.keys()):
            self.add(Guard(own, name, MISSING, f"{text}.{name}"))

    def of_class(self, owner: type, name: str) -> Any:
        """Watch the value under a name in a class, `nn.Module` excepted, and that classes before it have none."""
        above = [*takewhile(lambda cls: cls not in (nn.Module, object), owner.__mro__)]
        place = next((place for place, cls in enumerate(above) if name in vars(cls)), None)
        if place is None:
            return MISSING
        for cls in above[: place + 1]:
            entry = self.in_class(cls, name)
            self.add(entry)
        self.inside(entry.value, entry.text, name)
        return entry.value

    def in_class(self, cls: type, name: str) -> Guard:
        """The value under a name in the attributes of a class itself; these are each time the same object."""
        space = self._spaces.setdefault(cls, vars(cls))
        return Guard(space, name, space.get(name, MISSING), f"{cls.__name__}.{name}")

    def called(self, cls: type, wanted: Callable[[str], bool]) -> None:
        """Watch the functions of a user's class under wanted names, which are called without being looked up."""
        for each in cls.__mro__:
            if users_module(each.__module__):
                for name, value in list(vars(each).items()):
                    if wanted(name):
                        self._descriptor(value)

    def read_of(self, cls: type, name: str) -> None:
        """Watch the functions that reading an attribute of a class may run; one of the class may read names in it."""
        value = next((vars(x)[name] for x in cls.__mro__ if name in vars(x)), None)
        self._descriptor(value)
        if isinstance(value, classmethod) and (plain := plain_function(value.__func__)):
            names = names_in(plain.__code__)
            if not names <= self._looked_up.get(cls, frozenset()):
                self._in_class(cls, names)

    def _descriptor(self, value: Any) -> None:
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, cached_property):
            value = value.func
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, FUNCTIONS):
            self.function(value)
        elif hasattr(type(value), "__get__") and users_module(type(value).__module__):
            self.inside(value, f"a {type(value).__name__}")  # may keep the values that it gives


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object that are in a dict."""
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else {}


def has_own_reads(cls: type) -> bool:
    """True if a class of the user's decides itself what reading an attribute gives."""
    return users_module(getattr(unwrap(cls.__getattribute__), "__module__", None) or "builtins")


def _shown(value: Any) -> Any:
    """The dict behind a view of one, the items of a weak container, the value in shared memory; else the value."""
    kind = type(value)  # and not the class that a user's class may say it has
    if kind in _VIEWS:
        return next((each for each in gc.get_referents(value) if hasattr(each, "items")), value)
    if issubclass(kind, _WEAK):
        return value.data
    return value.get_obj() if kind.__module__ == "multiprocessing.sharedctypes" else value


def _in_context(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return None


def alone(value: Any) -> bool:
    """True if a value has nothing inside that is to be watched."""
    if isinstance(value, tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, (*PLAIN, torch.Tensor, *FUNCTIONS))
