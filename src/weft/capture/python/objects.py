"""A trace's reads of attributes: of modules, of objects of the user's, of settings of libraries.

While a step is traced, reading an attribute of such an object is noted, at any depth, in its own methods and
properties too. Objects that the step itself makes are none of them: it makes them anew each time.
"""

from __future__ import annotations

import os
import sys
import types
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, final

import numpy as np
import torch
from torch import nn

from weft.capture.fx.private import is_fake
from weft.capture.python.containers import CONTAINERS, HOLDERS, Containers
from weft.capture.python.reachable import is_users, names_in, texts_in
from weft.capture.python_guards import (
    FUNCTIONS,
    MISSING,
    PLAIN,
    AttributeRead,
    Guard,
    is_plain,
    size_guard,
)
from weft.files import users_module

# How many modules deep the names of a function are looked up: torch.nn.functional.relu.
_DEEP = 3
# Methods of a user class that torch calls by itself.
_CALLED = ("forward", "backward", "setup_context", "jvp", "vjp", "vmap")
# Objects of these, and of classes derived from them, count for themselves, and other threads use them too.
_SHARED = ("queue", "threading", "multiprocessing", "concurrent", "asyncio", "logging")
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of types in CPython
# Attributes that every module has for itself; of them, `training` alone is the user's.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_PARTS = ("modules", "parameters", "buffers")
# Attributes that the user may put on a module of a library.
_GIVEN = (*CONTAINERS, *HOLDERS, nn.Module, np.ndarray, *FUNCTIONS, torch.optim.Optimizer)


@final
@dataclass(slots=True)
class _SeenObject:
    """An object that was there before the step, kept alive.

    Attributes:
        owner: the object.
        before: its attributes then.
        text: the user's name of it; "" of the model.
        users: whether it is the user's own.
        module: whether it is an `nn.Module`.
        inner: whether it is one of the model's.
        fresh: whether nothing was read of it yet.
    """

    owner: Any
    before: dict[str, Any]
    text: str
    users: bool
    module: bool = False
    inner: bool = False
    fresh: bool = True

    def of(self, name: str) -> str:
        """The user's name of an attribute."""
        return f"{self.text}.{name}" if self.text else name

    def ignores(self, name: str) -> bool:
        """True for attributes that Python and torch read by themselves."""
        if self.module and name in _INTERNAL:
            return True
        return name.startswith("__") and (self.module or name != "__dict__")


class Objects(Containers):
    """The objects that a trace comes across, those of `Containers` included."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, _SeenObject] = {}
        # By class, what its `__getattribute__` was.
        self._classes: dict[type, Callable[[Any, str], Any]] = {nn.Module: object.__getattribute__}
        self._own: dict[type, Any] = {}
        self._spaces: dict[type, Mapping[str, Any]] = {}
        # The user's classes that functions reach, and the names that were looked up in them.
        self._named_in: dict[type, frozenset[str]] = {}
        self._reading = False
        # Class values of attributes that the step may set in instances.
        self.defaults: dict[tuple[int, Any], Any] = {}

    @abstractmethod
    def function(self, function: Any) -> None:
        """Note the names that a function of the user's uses, below partials and methods."""

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

    def module(self, module: nn.Module, text: str, inner: bool) -> None:
        """A module, of the model or not, that was there before the step."""
        if id(module) not in self._known:
            users = is_users(type(module).forward) or users_module(type(module).__module__)
            known = _SeenObject(module, dict(vars(module)), text, users, True, inner)
            self._known[id(module)] = known
            if inner:
                self._parts(known)

    def see(self, value: Any, text: str, users: bool = True) -> bool:
        """Note an object from before the step that the step reads under this name.

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
        self._known[id(value)] = _SeenObject(value, attributes_of(value), text, users)
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

    def named_by(self, function: types.FunctionType, seen: Sequence[Any]) -> None:
        """Note the modules, classes and settings that a function of the user's names, its defaults and the environment.

        Args:
            seen: what its globals and closures hold.
        """
        names = names_in(function.__code__)
        for value in seen:
            if isinstance(value, types.ModuleType):
                self._names_of(value, names)
            elif isinstance(value, type):
                self._named_in_class(value, names)
        if any(value is x for value in seen for x in (os, os.environ, os.getenv)):
            for text in sorted(texts_in(function.__code__)):
                # Private attribute: the dict that `os.environ` reads.
                held, key = os.environ._data, os.environ.encodekey(text)  # type: ignore[attr-defined]
                self.add(Guard(held, key, held.get(key, MISSING), f"os.environ[{text!r}]"))
        for value in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self.inside(value, f"a default of {function.__qualname__}")
        # Classes are passed on as arguments, so that any function may use the names in them.
        for cls, known in list(self._named_in.items()):
            if known != self.named:
                self._named_in_class(cls, self.named)

    def of_class(self, owner: type, name: str) -> Any:
        """Watch what a class has under a name, `nn.Module` excepted, and that classes before it have nothing."""
        spaces: list[tuple[type, Mapping[str, Any]]] = []
        for cls in owner.__mro__:
            if cls in (nn.Module, object):
                break
            spaces.append((cls, self._space(cls)))
            if name in spaces[-1][1]:
                for each, space in spaces:
                    text = f"{each.__name__}.{name}"
                    self.add(Guard(space, name, space.get(name, MISSING), text))
                self.inside(spaces[-1][1][name], text, name)
                return spaces[-1][1][name]
        return MISSING

    def _space(self, cls: type) -> Mapping[str, Any]:
        """The attributes of a class, each time the same object."""
        return self._spaces.setdefault(cls, vars(cls))

    def _named_in_class(self, cls: type, names: frozenset[str]) -> None:
        """Note the names that a class of the user's uses."""
        if not users_module(cls.__module__):
            return
        if type(cls) is not type:
            self._named_in_class(type(cls), names)
        self._named_in[cls] = self._named_in.get(cls, frozenset()) | names
        for name in sorted(names.intersection(*[{x for each in cls.__mro__ for x in vars(each)}])):
            self._looked_up(cls, name)
            self.of_class(cls, name)
        made = not issubclass(cls, nn.Module)
        self._functions(cls, lambda name: name in _CALLED or (made and name.startswith("__")))

    def _functions(self, cls: type, wanted: Callable[[str], bool]) -> None:
        """Functions of a class that are called without being looked up."""
        for each in cls.__mro__:
            if users_module(each.__module__):
                for name, value in list(vars(each).items()):
                    if wanted(name):
                        self._descriptor(value)

    def _looked_up(self, cls: type, name: str) -> None:
        """An attribute is to be read of a class: what that may run comes before what it reads."""
        self._descriptor(next((vars(x)[name] for x in cls.__mro__ if name in vars(x)), None))

    def _descriptor(self, value: Any) -> None:
        """A value of a class: the functions that reading it may run."""
        if isinstance(value, property):
            value = value.fget
        elif isinstance(value, cached_property):
            value = value.func
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        if isinstance(value, FUNCTIONS):
            self.function(value)
        elif hasattr(type(value), "__get__") and users_module(type(value).__module__):
            self.inside(value, f"a {type(value).__name__}")  # may keep what it gives

    def _names_of(
        self, module: types.ModuleType, names: frozenset[str], depth: int = _DEEP
    ) -> None:
        """Note the names that a module of Python uses; of a library's, its functions."""
        own, users = vars(module), users_module(module.__name__)
        if not depth or module.__name__.partition(".")[0] == "weft":
            return
        for name in sorted(names & own.keys()):
            value, text = own[name], f"{module.__name__}.{name}"
            if isinstance(value, types.ModuleType):
                self._names_of(value, names, depth - 1)
            elif users or isinstance(value, FUNCTIONS):
                self.add(Guard(own, name, value, text))
            if users and isinstance(value, type):
                self._named_in_class(value, names)
            elif users:
                self.inside(value, text, name)

    def _watch_class(self, cls: type) -> None:
        original = self._classes[cls]

        def reading(owner: Any, name: str) -> Any:
            known = self._known.get(id(owner))
            if known is None:
                return original(owner, name)
            if known.fresh:
                known.fresh = False
                if known.module and not known.inner:
                    self._parts(known)
            if known.ignores(name):
                return original(owner, name)
            if name not in known.before and (known.users or known.module):
                self._looked_up(type(owner), name)
            try:
                value = original(owner, name)
            except AttributeError:
                self._got(known, name, MISSING)
                raise
            self._got(known, name, value)
            return value

        reading.__wrapped__ = original  # type: ignore[attr-defined]
        self._own[cls] = vars(cls).get("__getattribute__")
        cls.__getattribute__ = reading  # type: ignore[method-assign, assignment]

    def _parts(self, known: _SeenObject) -> None:
        """Note the modules, parameters and buffers of a module."""
        where = known.text or type(known.owner).__name__
        for kind, part in zip(_PARTS, _parts_of(known.owner), strict=True):
            self.add(size_guard(part, f"{kind} of {where}"))
            for name, value in part.items():
                # For the model's own, others are refused (`weft.program.live.places`).
                if value is None or not known.inner:
                    self.add(Guard(part, name, value, known.of(name)))
            if not known.inner:
                self._order(part, f"{kind} of {where}")

    def _got(self, known: _SeenObject, name: str, value: Any) -> None:
        """An attribute was read of an object; `MISSING` where there is none."""
        owner = known.owner
        if name == "__dict__":
            for each, held in attributes_of(owner).items():
                if held is known.before.get(each, MISSING):
                    self._attribute(known, each, held, read=False)
        elif name in known.before:
            before, now = known.before[name], _space(owner, name).get(name, MISSING)
            # Where the model's tensors stand in objects, stand-ins do while the step runs.
            lent = not known.module and isinstance(before, torch.Tensor) and is_fake(now)
            if now is before or lent:
                self._attribute(known, name, before, read=True)
        elif known.module and value is MISSING and self._part(known, name):
            pass
        elif known.users and value is MISSING and _has_slot(type(owner), name):
            self.add(Guard(AttributeRead(owner), name, MISSING, known.of(name)), read=True)
        elif known.users or known.module:
            self._inherited(known, name)

    def _attribute(self, known: _SeenObject, name: str, value: Any, read: bool) -> None:
        """An attribute that an object has had before the step."""
        text, entry = known.of(name), Guard(_space(known.owner, name), name, value, known.of(name))
        if known.users or (known.module and self._may_be_given(name, value)):
            self.add(entry, read)
            self.inside(value, text, name)
        elif known.module and not alone(value):
            self.see(value, text, users=False)
        elif known.module or is_plain(value):
            self.add(entry, read and known.module)

    def _may_be_given(self, name: str, value: Any) -> bool:
        """True where the user may have put a value on a module of a library."""
        own = isinstance(value, _GIVEN) or users_module(type(value).__module__)
        return own and not (name.startswith("_") and name not in self.named)

    def _part(self, known: _SeenObject, name: str) -> bool:
        """Note a part of a module, which has it by name; False where it has none."""
        parts = [part for part in _parts_of(known.owner) if name in part]
        for part in parts:
            empty = part[name] is None  # which the step may fill
            if empty or not known.inner:
                self.add(Guard(part, name, part[name], known.of(name)), read=empty)
        return bool(parts)

    def _inherited(self, known: _SeenObject, name: str) -> None:
        """An attribute that was read of an object's class, that of the class, and that the object has none.

        Or one that was looked for and is nowhere.
        """
        cls, entry = type(known.owner), Guard(_own_dict(known.owner), name, MISSING, known.of(name))
        value = self.of_class(cls, name)
        if value is MISSING and hasattr(nn.Module, name):
            return
        if value is MISSING:
            for each in cls.__mro__[:-1]:
                self.add(Guard(self._space(each), name, MISSING, f"{each.__name__}.{name}"))
        elif hasattr(type(value), "__set__"):
            return
        else:
            self.defaults[entry.key] = value
        self.add(entry, read=True)


def alone(value: Any) -> bool:
    """True where a value has nothing inside that is to be watched."""
    if isinstance(value, tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, (*PLAIN, torch.Tensor, *FUNCTIONS))


def _parts_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._modules, module._parameters, module._buffers


def _noted(cls: type) -> bool:
    """True where reads of the attributes of a class's instances can be noted, and are worth it."""
    packages = {each.__module__.partition(".")[0] for each in cls.__mro__[:-1]}
    first = cls.__module__.partition(".")[0]
    plain = issubclass(cls, (*PLAIN, *FUNCTIONS, type, types.ModuleType, nn.Module, torch.Tensor))
    changeable = cls.__flags__ & _HEAP and not cls.__flags__ & _IMMUTABLE
    ours = first not in ("torch", "weft", "numpy") and packages.isdisjoint(_SHARED)
    return bool(changeable) and not plain and ours


def attributes_of(owner: Any) -> dict[str, Any]:
    """The attributes that an object has itself, those in `__slots__` included."""
    found = dict(vars(owner) if isinstance(owner, type) else _own_dict(owner))
    for cls in type(owner).__mro__:
        for name, member in vars(cls).items():
            if isinstance(member, types.MemberDescriptorType):
                with suppress(AttributeError):
                    found[name] = member.__get__(owner)
    return found


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
    return own if name in own else AttributeRead(owner)
