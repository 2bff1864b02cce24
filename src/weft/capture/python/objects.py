"""A trace's reads of objects that are no modules of the model: the user's, other modules, settings of libraries.

While a step is traced, reading an attribute of such an object is noted, at any depth, in its own methods and
properties too. Objects that the step itself makes are none of them: it makes them anew each time.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from inspect import unwrap
from typing import Any, Protocol, final
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import torch
from torch import nn

from weft.capture.fx.private import is_fake
from weft.capture.python.reached import names_in, texts_in
from weft.capture.watch import (
    FUNCTIONS,
    MISSING,
    PLAIN,
    Array,
    Attribute,
    Content,
    Entry,
    is_plain,
)
from weft.files import users_module

# How many modules deep the names of a function are looked up: torch.nn.functional.relu.
_DEEP = 3
# What torch calls of a class of the user's by itself.
_CALLED = ("forward", "backward", "setup_context", "jvp", "vjp", "vmap")
# Objects of these, and of classes derived from them, count for themselves, and other threads use them too.
_SHARED = ("queue", "threading", "multiprocessing", "concurrent", "asyncio", "logging")
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of types in CPython


class Notes(Protocol):
    """The receiver of notes about objects and functions that are read."""

    def add(self, entry: Entry, read: bool = False) -> None:
        """A value; `read` where it is known that the step has read it."""

    def inside(self, value: Any, text: str, name: str | None = None) -> None:
        """Note the items of a container or the attributes of an object; `name` is the last one that leads to it."""

    def function(self, function: Any) -> None:
        """Note the names that a function of the user's uses, below partials and methods."""

    def inherited(self, owner: Any, own: dict[str, Any], name: str, text: str) -> None:
        """An attribute that an object has not itself, but of its class, or not at all.

        Args:
            owner: the object.
            own: its attributes.
            text: of the object.
        """

    def of_class(self, owner: type, name: str) -> Any:
        """An attribute of a class."""


@final
@dataclass(frozen=True)
class _Seen:
    """An object that was there before the step, kept alive; its attributes then; whether it is the user's own."""

    owner: Any
    before: dict[str, Any]
    text: str
    users: bool


@final
class Objects:
    """The objects that a trace comes across.

    Args:
        notes: is told what is read of them.
    """

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._known: dict[int, _Seen] = {}
        # By class, what its `__getattribute__` was.
        self._classes: dict[type, Callable[[Any, str], Any]] = {}
        self._own: dict[type, Any] = {}
        # The user's classes that functions reach, and the names that were looked up in them.
        self._named: dict[type, frozenset[str]] = {}
        self._reading = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """While this lasts, reading an attribute of an object that was seen is noted."""
        self._reading = True
        try:
            for cls in list(self._classes):
                self._watch_class(cls)
            yield
        finally:
            self._reading = False
            for cls, own in reversed(self._own.items()):
                if own is None:
                    del cls.__getattribute__
                else:
                    cls.__getattribute__ = own  # type: ignore[method-assign]
            self._own.clear()

    def see(self, value: Any, text: str, users: bool = True) -> bool:
        """An object that was there before the step, and that it has come across, by this name.

        Returns whether reading its attributes is noted.

        Args:
            users: False for what a module of a library holds, of which plain values are noted.
        """
        cls = type(value)
        if id(value) in self._known:
            return True
        if not _noted(cls) or users_module(cls.__module__) != users:
            return False
        if not users and cls.__module__.partition(".")[0] in sys.stdlib_module_names:
            return False
        self._known[id(value)] = _Seen(value, dict(_held(value)), text, users)
        if cls not in self._classes:
            self._classes[cls] = next(
                self._classes.get(each) or vars(each)["__getattribute__"]
                for each in cls.__mro__
                if each in self._classes or "__getattribute__" in vars(each)
            )
            if self._reading:
                self._watch_class(cls)
            if users:
                self._functions(cls, lambda name: name.startswith("__"))
        return True

    def array(self, value: Array, text: str) -> None:
        """An array of numpy or Python that is read."""
        space = Content(value)
        self._notes.add(Entry(space, "content", space.get("content", b""), f"the values of {text}"))

    def named_by(self, function: types.FunctionType, seen: Sequence[Any]) -> None:
        """Note the modules, classes and settings that a function of the user's names, its defaults and the environment.

        Args:
            seen: what its globals and closures hold.
        """
        names = names_in(function.__code__)
        environment = False
        for value in seen:
            if isinstance(value, types.ModuleType):
                self._module(value, names)
            elif isinstance(value, type):
                self.named_in_class(value, names)
            environment = environment or any(value is x for x in (os, os.environ, os.getenv))
        if environment:
            for text in sorted(texts_in(function.__code__)):
                # Private attribute: the dict that `os.environ` reads.
                held, key = os.environ._data, os.environ.encodekey(text)  # type: ignore[attr-defined]
                self._notes.add(Entry(held, key, held.get(key, MISSING), f"os.environ[{text!r}]"))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._notes.inside(value, f"a default of {function.__qualname__}")

    def named_in_class(self, cls: type, names: frozenset[str]) -> None:
        """Note the names that a class of the user's uses."""
        if not users_module(cls.__module__):
            return
        if type(cls) is not type:
            self.named_in_class(type(cls), names)
        self._named[cls] = self._named.get(cls, frozenset()) | names
        for name in sorted(names.intersection(*[{x for each in cls.__mro__ for x in vars(each)}])):
            self.looked_up(cls, name)
            self._notes.of_class(cls, name)
        made = not issubclass(cls, nn.Module)
        self._functions(cls, lambda name: name in _CALLED or (made and name.startswith("__")))

    def named_since(self, names: frozenset[str]) -> None:
        """Note the names that any function uses of the classes seen so far: classes are passed on as arguments."""
        for cls, known in list(self._named.items()):
            if known != names:
                self.named_in_class(cls, names)

    def _functions(self, cls: type, wanted: Callable[[str], bool]) -> None:
        """Functions of a class that are called without being looked up."""
        for each in cls.__mro__:
            if users_module(each.__module__):
                for name, value in list(vars(each).items()):
                    if wanted(name):
                        self.descriptor(value)

    def looked_up(self, cls: type, name: str) -> None:
        """An attribute is to be read of a class: what that may run comes before what it reads."""
        value = next((vars(each)[name] for each in cls.__mro__ if name in vars(each)), None)
        self.descriptor(value)

    def descriptor(self, value: Any) -> None:
        """A value of a class: the functions that reading it may run."""
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, cached_property):
            value = value.func
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, FUNCTIONS):
            self._notes.function(value)
        elif hasattr(type(value), "__get__") and users_module(type(value).__module__):
            self._notes.inside(value, f"a {type(value).__name__}")  # may keep what it gives

    def _module(self, module: types.ModuleType, names: frozenset[str], depth: int = _DEEP) -> None:
        """Note the names that a module of Python uses; of a library's, its functions."""
        own, users = vars(module), users_module(module.__name__)
        if not depth or module.__name__.partition(".")[0] == "weft":
            return
        for name in sorted(names & own.keys()):
            value, text = own[name], f"{module.__name__}.{name}"
            if isinstance(value, types.ModuleType):
                self._module(value, names, depth - 1)
            elif users or isinstance(value, FUNCTIONS):
                self._notes.add(Entry(own, name, value, text))
            if users and isinstance(value, type):
                self.named_in_class(value, names)
            elif users:
                self._notes.inside(value, text, name)

    def _watch_class(self, cls: type) -> None:
        original = self._classes[cls]

        def reading(owner: Any, name: str) -> Any:
            known = self._known.get(id(owner))
            if known is None or (name.startswith("__") and name != "__dict__"):
                return original(owner, name)
            if name not in known.before and known.users:
                self.looked_up(cls, name)
            try:
                value = original(owner, name)
            except AttributeError:
                self._read(known, name, MISSING)
                raise
            self._read(known, name, value)
            return value

        reading.__wrapped__ = original  # type: ignore[attr-defined]
        self._own[cls] = vars(cls).get("__getattribute__")
        cls.__getattribute__ = reading  # type: ignore[method-assign, assignment]

    def _read(self, known: _Seen, name: str, value: Any) -> None:
        """An attribute was read of an object."""
        owner, text = known.owner, f"{known.text}.{name}"
        own = dict(_held(owner)) if name == "__dict__" else {}
        for each in own.keys() & known.before.keys():
            if own[each] is known.before[each] and (known.users or is_plain(own[each])):
                self._notes.add(Entry(_space(owner, each), each, own[each], f"{known.text}.{each}"))
                if known.users:
                    self._notes.inside(own[each], f"{known.text}.{each}", each)
        if name in known.before:
            before = known.before[name]
            now = _space(owner, name).get(name, MISSING)
            # Where the model's tensors stand outside of it, stand-ins do while the step runs.
            same = now is before or (isinstance(before, torch.Tensor) and is_fake(now))
            if same and (known.users or is_plain(before)):
                self._notes.add(Entry(_space(owner, name), name, before, text), known.users)
                if known.users:
                    self._notes.inside(before, text, name)
        elif known.users and value is MISSING and _has_slot(type(owner), name):
            self._notes.add(Entry(Attribute(owner), name, MISSING, text), read=True)
        elif known.users and name != "__dict__":
            self._notes.inherited(owner, _own_dict(owner), name, known.text)


def has_own_reads(cls: type) -> bool:
    """True where a class of the user's says itself what reading an attribute gives."""
    return users_module(getattr(unwrap(cls.__getattribute__), "__module__", None) or "builtins")


def _noted(cls: type) -> bool:
    """True where reads of the attributes of a class's instances can be noted, and are worth it."""
    packages = {each.__module__.partition(".")[0] for each in cls.__mro__[:-1]}
    first = cls.__module__.partition(".")[0]
    plain = issubclass(cls, (*PLAIN, *FUNCTIONS, type, types.ModuleType, nn.Module, torch.Tensor))
    changeable = cls.__flags__ & _HEAP and not cls.__flags__ & _IMMUTABLE
    ours = first not in ("torch", "weft", "numpy") and packages.isdisjoint(_SHARED)
    return bool(changeable) and not plain and ours


def _held(owner: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that an object has itself, those in `__slots__` included."""
    yield from _own_dict(owner).items()
    for cls in type(owner).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(owner)
                except AttributeError:
                    continue


def _has_slot(cls: type, name: str) -> bool:
    members = (vars(each).get(name) for each in cls.__mro__)
    return any(isinstance(each, types.MemberDescriptorType) for each in members)


def _own_dict(owner: Any) -> dict[str, Any]:
    """`vars` of an object, past what its class does to give it."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _space(owner: Any, name: str) -> Any:
    own = _own_dict(owner)
    return own if name in own else Attribute(owner)


_VIEWS: tuple[type, ...] = (
    types.MappingProxyType,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_WEAK = (WeakValueDictionary, WeakKeyDictionary, WeakSet)
# Their content is their bytes.
BYTES = (bytearray, memoryview, ctypes._SimpleCData, ctypes.Array, ctypes.Structure)


def shown(value: Any) -> Any:
    """The dict behind a view of one, the items of a weak container, the value in shared memory; else the value."""
    kind = type(value)  # and not what a class of the user's may say that it is
    if kind in _VIEWS:
        return next((each for each in gc.get_referents(value) if hasattr(each, "items")), value)
    if issubclass(kind, _WEAK):
        return value.data
    if kind.__module__ == "multiprocessing.sharedctypes":
        return value.get_obj()
    return value
