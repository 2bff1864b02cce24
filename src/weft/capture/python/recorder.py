"""The Python values that a trace reads, recorded for comparison before every step (`weft.capture.python_guards`).

While a step is traced, each read of an attribute is noted: of a module, of an object of the user's, of settings that a
library's module holds, at any depth, in its own methods and properties too. Objects that the step itself makes are not
noted, as it makes them again each time. All else is noted by a walk (`weft.capture.python.guard_walk`).
"""

from __future__ import annotations

import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, final

import numpy as np
import torch
from torch import nn

from weft.capture.fx.private import is_fake
from weft.capture.python.caches import Cache
from weft.capture.python.guard_walk import CONTAINERS, HOLDERS, Walk, alone
from weft.capture.python.reachable import hooks_of, is_user_code, user_functions
from weft.capture.python.side_effects import check_unmoved, depends_on
from weft.capture.python.symbolic import is_symbolic
from weft.capture.python.tensor_reads import values_of
from weft.capture.python.unbacked import is_unbacked
from weft.capture.python_guards import (
    FUNCTIONS,
    MISSING,
    PLAIN,
    AttributeRead,
    Guard,
    PythonGuards,
    is_plain,
    question_guard,
    size_guard,
)
from weft.files import users_module

# Objects of these, and of classes derived from them, count for themselves, and other threads use them too.
_SHARED = ("queue", "threading", "multiprocessing", "concurrent", "asyncio", "logging")
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of types in CPython
# Attributes that every module has for itself; of them, `training` alone is the user's.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_PARTS = ("modules", "parameters", "buffers")
# Values that the user may put on a module of a library.
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


@final
class PythonRecorder(Walk):
    """Collects the reads of one trace.

    Attributes:
        counted: True once the step was refused, as it changes a value that it has read.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.counted = False
        # Entries of attributes, of which it is known that the step has read them.
        self._read: list[Guard] = []
        # Values that classes have for attributes that the step may set in their instances.
        self._defaults: dict[tuple[int, Any], Any] = {}
        self._valued: dict[int, torch.Tensor] = {}
        self._seen: dict[int, _SeenObject] = {}
        # By class, its `__getattribute__`; and that which it had itself while another one is in its place.
        self._reads: dict[type, Callable[[Any, str], Any]] = {nn.Module: object.__getattribute__}
        self._own: dict[type, Any] = {}
        self._reading = False
        functions = user_functions(function, model)
        for each in functions:
            self.know(each.__code__)
        modules = list(model.named_modules())
        for path, module in modules:
            self.module(module, path, inner=True)
        dtype = torch.get_default_dtype
        self.add(question_guard(dtype, dtype, "torch.get_default_dtype()"))
        for each in functions:
            self.function(each)
        for path, module in modules:
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    self.on_tensor(tensor, f"{path}.{name}" if path else name)
        for called in (function, *hooks_of(model)):
            self.inside(called, type(called).__name__)

    # ------------------------------------------------------------------------------- after the trace

    def watch(self) -> PythonGuards:
        """The values that are to be compared before every step.

        Call it before the values that the step wrote are put back.

        Raises:
            CaptureError: when the step changes a number, flag or text that it has read.
        """
        read = {entry.key for entry in self._read}
        for entry in self.entries:
            now, before = entry.value_now, entry.value
            if before is MISSING:
                before = self._defaults.get(entry.key, MISSING)
            plain = isinstance(now, PLAIN) and isinstance(before, PLAIN)
            if entry.key in read and plain and before is not None and not entry.holds():
                self.counted = True
                raise depends_on([replace(entry, value=before)])
        held = [entry for entry in self.entries if entry.holds()]
        # Places that the step fills where there was nothing are put back to nothing.
        made = [replace(x, made=True) for x in self.entries if _empty(x) and not x.holds()]
        return PythonGuards((*held, *self.looked_up(), *made))

    def changes(self) -> list[Guard]:
        """The values that the step has changed and could have read, as they were; without tensors and values it makes.

        Raises:
            CaptureError: when it has drawn random numbers of Python, or has advanced an iterator.
        """
        moving = list(check_unmoved(self._positions.values()))
        read = {entry.key for entry in self._read}
        found: list[Guard] = []
        for entry in (*self.entries, *self.beside):
            now = entry.value_now
            later = isinstance(now, torch.Tensor) or is_unbacked(now)
            made = entry.key in read and _empty(entry)
            by_default = entry.value is MISSING and isinstance(entry.space, defaultdict)
            if not (made or later or entry.holds() or (by_default and is_plain(now))):
                found.append(entry)
        return [*found, *moving]

    def caches(self) -> list[Cache]:
        """The tensors that the step put in attributes where it had read none, or another one."""
        found = []
        for entry in self._read:
            now, before = entry.value_now, entry.value
            if isinstance(now, torch.Tensor) and now is not before:
                if isinstance(before, torch.Tensor):
                    found.append(Cache(entry.text, now, before))
                elif _empty(entry):
                    found.append(Cache(entry.text, now, None))
        return found

    def made(self) -> list[Guard]:
        """Numbers that the step made where it had read none, as they are after it."""
        entries = (replace(each, value=each.value_now) for each in self._read if _empty(each))
        return [each for each in entries if isinstance(each.value, int | float)]

    # ------------------------------------------------------------------------------ during the trace

    def values(self, tensor: torch.Tensor) -> None:
        """Watch the values of a tensor from outside, which Python reads."""
        if id(tensor) not in self._valued:
            self._valued[id(tensor)] = tensor
            _, text = self._tensors.get(id(tensor), (tensor, f"a tensor {list(tensor.shape)}"))
            self.add(question_guard(None, partial(values_of, tensor), f"the values of {text}"))

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within the context, reading an attribute of an object that was seen is noted."""
        self._reading = True
        try:
            for cls in list(self._reads):
                self._note_reads_of(cls)
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
        """Note the attributes that are read of a module; `inner` of the model's own."""
        if id(module) not in self._seen:
            users = is_user_code(type(module).forward) or users_module(type(module).__module__)
            seen = _SeenObject(module, dict(vars(module)), text, users, True, inner)
            self._seen[id(module)] = seen
            self.class_of_object(type(module))
            if inner:
                self._parts(seen)

    def see(self, value: Any, text: str, users: bool = True) -> bool:
        """Note the attributes that are read of an object, where it can be; see `Walk.see`."""
        cls = type(value)
        if id(value) in self._seen:
            return True
        if not _noted(cls) or users_module(cls.__module__) != users:
            return False
        if not users and cls.__module__.partition(".")[0] in sys.stdlib_module_names:
            return False
        self._seen[id(value)] = _SeenObject(value, attributes_of(value), text, users)
        if cls not in self._reads:
            self._reads[cls] = next(
                self._reads.get(each) or vars(each)["__getattribute__"]
                for each in cls.__mro__
                if each in self._reads or "__getattribute__" in vars(each)
            )
            if self._reading:
                self._note_reads_of(cls)
            if users:
                self.called(cls, lambda name: name.startswith("__"))
                self.class_of_object(cls)
        return True

    def _note_reads_of(self, cls: type) -> None:
        original = self._reads[cls]

        def reading(owner: Any, name: str) -> Any:
            seen = self._seen.get(id(owner))
            if seen is None:
                return original(owner, name)
            if seen.fresh:
                seen.fresh = False
                if seen.module and not seen.inner:
                    self._parts(seen)
            # Python and torch read these by themselves.
            special = name.startswith("__") and (seen.module or name != "__dict__")
            if special or (seen.module and name in _INTERNAL):
                return original(owner, name)
            if name not in seen.before and (seen.users or seen.module):
                self.read_of(type(owner), name)
            try:
                value = original(owner, name)
            except AttributeError:
                self._got(seen, name, MISSING)
                raise
            self._got(seen, name, value)
            return value

        reading.__wrapped__ = original  # type: ignore[attr-defined]
        self._own[cls] = vars(cls).get("__getattribute__")
        cls.__getattribute__ = reading  # type: ignore[method-assign, assignment]

    def _note(self, entry: Guard, read: bool = True) -> None:
        """Watch the value of an attribute; `read` where it is known that the step has read it."""
        self.add(entry)
        if read and not is_symbolic(entry.value):
            self._read.append(entry)

    def _parts(self, seen: _SeenObject) -> None:
        """Watch the modules, parameters and buffers of a module."""
        where = seen.text or type(seen.owner).__name__
        for kind, part in zip(_PARTS, _parts_of(seen.owner), strict=True):
            self.add(size_guard(part, f"{kind} of {where}"))
            for name, value in part.items():
                # Of the model's own, others are refused (`weft.program.live.ownership`).
                if value is None or not seen.inner:
                    self.add(Guard(part, name, value, seen.of(name)))
            if not seen.inner:
                self.order(part, f"{kind} of {where}")

    def _got(self, seen: _SeenObject, name: str, value: Any) -> None:
        """An attribute was read of an object; `MISSING` where there is none."""
        owner = seen.owner
        if name == "__dict__":
            for each, held in attributes_of(owner).items():
                if held is seen.before.get(each, MISSING):
                    self._attribute(seen, each, held, read=False)
        elif name in seen.before:
            before, now = seen.before[name], _space(owner, name).get(name, MISSING)
            # Stand-ins take the place of the model's tensors in objects while the step runs.
            lent = not seen.module and isinstance(before, torch.Tensor) and is_fake(now)
            if now is before or lent:
                self._attribute(seen, name, before, read=True)
        elif seen.module and value is MISSING and self._part(seen, name):
            pass
        elif seen.users and value is MISSING and _has_slot(type(owner), name):
            self._note(Guard(AttributeRead(owner), name, MISSING, seen.of(name)))
        elif seen.users or seen.module:
            self._inherited(seen, name)

    def _part(self, seen: _SeenObject, name: str) -> bool:
        """Watch a part of a module, which has it by name; False if it has none."""
        parts = [part for part in _parts_of(seen.owner) if name in part]
        for part in parts:
            empty = part[name] is None  # which the step may fill
            if empty or not seen.inner:
                self._note(Guard(part, name, part[name], seen.of(name)), read=empty)
        return bool(parts)

    def _attribute(self, seen: _SeenObject, name: str, value: Any, read: bool) -> None:
        """An attribute that an object has had before the step."""
        text = seen.of(name)
        entry = Guard(_space(seen.owner, name), name, value, text)
        own = isinstance(value, _GIVEN) or users_module(type(value).__module__)
        # The user may have put it on a module of a library.
        given = seen.module and own and (not name.startswith("_") or name in self.named)
        if seen.users or given:
            self._note(entry, read)
            self.inside(value, text, name)
        elif seen.module and not alone(value):
            self.see(value, text, users=False)
        elif seen.module or is_plain(value):
            self._note(entry, read and seen.module)

    def _inherited(self, seen: _SeenObject, name: str) -> None:
        """An attribute that was read of an object's class, while the object has none; or that is nowhere."""
        cls, entry = type(seen.owner), Guard(_own_dict(seen.owner), name, MISSING, seen.of(name))
        value = self.of_class(cls, name)
        if value is MISSING:
            if hasattr(nn.Module, name):
                return
            for each in cls.__mro__[:-1]:
                self.add(self.in_class(each, name))
        elif hasattr(type(value), "__set__"):
            return
        else:
            self._defaults[entry.key] = value
        self._note(entry)


def _parts_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._modules, module._parameters, module._buffers


def _noted(cls: type) -> bool:
    """True if reads of the attributes of a class's instances can be noted, and are worth it."""
    packages = {each.__module__.partition(".")[0] for each in cls.__mro__[:-1]}
    first = cls.__module__.partition(".")[0]
    plain = issubclass(cls, (*PLAIN, *FUNCTIONS, type, types.ModuleType, nn.Module, torch.Tensor))
    changeable = cls.__flags__ & _HEAP and not cls.__flags__ & _IMMUTABLE
    ours = first not in ("torch", "weft", "numpy") and packages.isdisjoint(_SHARED)
    return bool(changeable) and not plain and ours


def _empty(entry: Guard) -> bool:
    """True if nothing was in a place."""
    return entry.value is None or entry.value is MISSING


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
    """`vars` of an object, past the user's own `__getattribute__`."""
    try:
        found = object.__getattribute__(owner, "__dict__")
    except AttributeError:
        return {}
    return found if isinstance(found, dict) else {}


def _space(owner: Any, name: str) -> Any:
    own = _own_dict(owner)
    return own if name in own else AttributeRead(owner)
