"""A trace's reads of Python, recorded to be compared before every step (`weft.capture.python_guards`).

Recorded are: attributes of modules that are read, those of classes and those that were looked for and not there
included; which modules, parameters and buffers each module has; globals and variables of closures that the user's own
functions name; and what lies in all these.
"""

from __future__ import annotations

import array
import ctypes
import gc
import types
from collections import defaultdict
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, final
from weakref import ReferenceType, WeakKeyDictionary, WeakSet, WeakValueDictionary

import numpy as np
import torch
from torch import nn

from weft.capture.numbers.unbacked import is_unbacked
from weft.capture.python.caches import Cache
from weft.capture.python.containers import CONTAINERS, attributes, has_own_reads
from weft.capture.python.objects import Objects, alone
from weft.capture.python.reachable import (
    asked_in,
    bound_to,
    cells_of,
    globals_of,
    hooks_of,
    is_users,
    names_in,
    plain_function,
    user_attributes,
    user_functions,
)
from weft.capture.python.side_effects import check_unmoved, depends_on, position_of
from weft.capture.python.tensor_reads import values_of
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

# Keys that optimizers and schedulers keep in groups beside hyperparameters.
_OF_GROUPS = ("params", "param_names", "initial_lr")
# Of whose classes nothing is watched.
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
_ARRAYS = (np.ndarray, array.array)


@final
class PythonRecorder(Objects):
    """Collects what the trace of one step reads.

    Attributes:
        counted: True once the step was refused, as it changes what it has read.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        super().__init__()
        self.counted = False
        self._positions: dict[int, Guard] = {}
        self._visited: set[int] = set()
        # The ones of which attributes are watched, with the user's names of them; and those whose values Python reads.
        self._tensors: dict[int, tuple[torch.Tensor, str]] = {}
        self._valued: dict[int, torch.Tensor] = {}
        functions = user_functions(function, model)
        codes = [each.__code__ for each in functions]
        self.named = frozenset[str]().union(*map(names_in, codes))
        self._asked = frozenset[str]().union(*map(asked_in, codes))
        for code in codes:
            self.keys.add(code)
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
                    self._on_tensor(tensor, f"{path}.{name}" if path else name)
        for called in (function, *hooks_of(model)):
            for owner in bound_to(called):
                if not isinstance(owner, nn.Module):
                    self.inside(owner, type(owner).__name__)
            self._keywords(called)

    def watch(self) -> PythonGuards:
        """The values that are to be compared before every step.

        Call it before what the step wrote is put back.

        Raises:
            CaptureError: when the step changes a number, flag or text that it has read.
        """
        read = {entry.key for entry in self.read}
        for entry in self.entries:
            now, before = entry.value_now, entry.value
            if before is MISSING:
                before = self.defaults.get(entry.key, MISSING)
            plain = isinstance(now, PLAIN) and isinstance(before, PLAIN)
            if entry.key in read and plain and before is not None and not entry.holds():
                self.counted = True
                raise depends_on([replace(entry, value=before)])
        held = [entry for entry in self.entries if entry.holds()]
        # Attributes that the step creates are deleted again.
        made = [replace(x, made=True) for x in self.entries if _empty(x) and not x.holds()]
        return PythonGuards((*held, *self.looked_up(), *made))

    def changes(self) -> list[Guard]:
        """The values that the step has changed and could have read, as they were; tensors and what it makes apart.

        Raises:
            CaptureError: when it has drawn random numbers of Python, or has advanced an iterator.
        """
        moving = list(check_unmoved(self._positions.values()))
        read = {entry.key for entry in self.read}
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
        for entry in self.read:
            now = entry.value_now
            kept = entry.value is MISSING or isinstance(entry.value, torch.Tensor | None)
            if kept and isinstance(now, torch.Tensor) and now is not entry.value:
                before = entry.value if isinstance(entry.value, torch.Tensor) else None
                found.append(Cache(entry.text, now, before))
        return found

    def made(self) -> list[Guard]:
        """Numbers that the step made where it had read none, as they are after it."""
        entries = (replace(each, value=each.value_now) for each in self.read if _empty(each))
        return [each for each in entries if isinstance(each.value, int | float)]

    def values(self, tensor: torch.Tensor) -> None:
        """Watch the values of a tensor from outside, which Python reads."""
        if id(tensor) not in self._valued:
            self._valued[id(tensor)] = tensor
            _, text = self._tensors.get(id(tensor), (tensor, f"a tensor {list(tensor.shape)}"))
            self.add(question_guard(None, partial(values_of, tensor), f"the values of {text}"))

    def function(self, function: Any) -> None:
        """Note the names that a function of the user's uses, and the object that it is bound to."""
        if isinstance(function, types.MethodType | partial):
            for owner in bound_to(function):
                self.inside(owner, type(owner).__name__)
        self._keywords(function)
        plain = plain_function(function)
        if plain is None or id(plain) in self._visited or not is_users(plain):
            return
        self._visited.add(id(plain))
        self._arguments(plain)
        title, code = plain.__qualname__, plain.__code__
        self.named |= names_in(code)
        self.keys.add(code)
        for name in sorted(vars(plain).keys() - {"__wrapped__"}):
            self.put(vars(plain), name, vars(plain)[name], f"{title}.{name}")
        self._asked |= asked_in(code)
        if "initial_seed" in names_in(code):
            self.add(question_guard(None, torch.initial_seed, "torch.initial_seed()"))
        self._variables(plain)

    def _arguments(self, function: types.FunctionType) -> None:
        """Watch the values of arguments that are not given."""
        title = function.__qualname__
        if function.__defaults__:
            text = f"the defaults of {title}"
            self.add(Guard(AttributeRead(function), "__defaults__", function.__defaults__, text))
        named = function.__kwdefaults__ or {}
        for name, value in named.items():
            self.add(Guard(named, name, value, f"the default of {name} of {title}"))

    def _variables(self, plain: types.FunctionType) -> None:
        """Watch the globals of a function and the variables of its closure, and the classes above its own."""
        title, code = plain.__qualname__, plain.__code__
        names = [(space, name) for space, name in globals_of(plain) if name in space]
        cells = cells_of(plain)
        for space, name in names:
            self.put(space, name, space[name], f"the global {name}")
        for name, cell in cells:
            text = f"{name} in the closure of {title}"
            self.add(Guard(AttributeRead(cell), "cell_contents", cell.cell_contents, text))
            self.inside(cell.cell_contents, text, name)
            if name == "__class__" and "super" in code.co_names:
                for base in cell.cell_contents.__bases__:
                    for each in sorted(names_in(code)):
                        self.of_class(base, each)
        held = [space[name] for space, name in names]
        self.named_by(plain, [*held, *(cell.cell_contents for _, cell in cells)])

    def inside(self, value: Any, text: str, name: str | None = None, written: bool = True) -> None:
        """Watch what is in a value; see `Containers.inside`."""
        value = _shown(value)
        if callable(value) and not isinstance(value, type | nn.Module):
            self.function(value)
        if isinstance(value, torch.Tensor):
            self._on_tensor(value, text)
        elif alone(value) or self._moves(value, text):
            return
        elif isinstance(value, nn.Module):
            for path, each in value.named_modules():
                self.module(each, f"{text}.{path}" if path else text, inner=False)
        elif isinstance(value, ReferenceType):
            self.add(question_guard(value, lambda: value() is None, text))
            self.inside(value(), text, name, written)
        elif not self._of_libraries(value, text):
            self._in_object(value, text, name, written)

    def _moves(self, value: Any, text: str) -> bool:
        """Note where an object is that gives something else each time; False where a value is none."""
        if id(value) in self._positions:
            return True
        position = position_of(value, text)
        if position is not None:
            self._positions[id(value)] = position
        return position is not None

    def _of_libraries(self, value: Any, text: str) -> bool:
        """Watch an object of Python, numpy or torch whose state is no attribute; False where it is none of them."""
        if isinstance(value, _ARRAYS):
            self.add(question_guard(value, value.tobytes, f"the values of {text}"))
        elif isinstance(value, _BYTES):
            self.add(question_guard(value, lambda: bytes(value), text))
        elif isinstance(value, ContextVar):
            held = partial(_in_context, value)
            self.add(question_guard(value, held, text, equal=False))
            self.inside(held(), text)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, text)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            rates = lambda: list(value.get_last_lr())  # noqa: E731
            self.add(question_guard(value, rates, f"the learning rates of {text}"))
        else:
            return False
        return True

    def _in_object(self, value: Any, text: str, name: str | None, written: bool) -> None:
        """Watch what a container holds, or an object: of the user's what is read, of others what functions name."""
        reads_noted = self.see(value, text)
        container = isinstance(value, CONTAINERS)
        if reads_noted and has_own_reads(type(value)):  # which may pass by what is noted
            written = reads_noted = False
        if not container and (reads_noted or isinstance(value, type | types.ModuleType)):
            return
        self.walk(value, text, name, written)
        if not container and isinstance(getattr(value, "__dict__", None), dict):
            self._instance(value, attributes(value), text)

    def _instance(self, value: Any, own: dict[str, Any], text: str) -> None:
        """Watch what the user's functions name of the class of an object, and that it has what it has not."""
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

    def _on_tensor(self, tensor: torch.Tensor, text: str) -> None:
        """Watch what the user has put on a tensor, and what functions ask for there."""
        if id(tensor) in self._tensors:
            return
        self._tensors[id(tensor)] = tensor, text
        own, space = vars(tensor), AttributeRead(tensor)
        for key, value in user_attributes(tensor).items():
            self.put(space, key, value, f"{text}.{key}")
        for key in self._asked:
            if key not in own and not hasattr(torch.Tensor, key):
                self.add(Guard(space, key, MISSING, f"{text}.{key}"))

    def _optimizer(self, optimizer: torch.optim.Optimizer, text: str) -> None:
        """Watch what the user has put on an optimizer and into its groups, and hyperparameters that functions name."""
        for number, group in enumerate(optimizer.param_groups):
            users = group.keys() - {*optimizer.defaults, *_OF_GROUPS}
            for name in sorted((self.named & group.keys() - {"params"}) | users):
                self.put(group, name, group[name], f"{text}.param_groups[{number}][{name!r}]")
        own = vars(optimizer)
        for name in sorted(self.named & own.keys() - {"defaults", "state", "param_groups"}):
            if not name.startswith("_") and not isinstance(own[name], FUNCTIONS):
                self.put(own, name, own[name], f"{text}.{name}")

    def _keywords(self, function: Any) -> None:
        """Watch the arguments that partials give by name."""
        while isinstance(function, partial):
            self.add(size_guard(function.keywords, "keywords of a partial"))
            for name, value in function.keywords.items():
                self.put(function.keywords, name, value, f"the keyword {name} of a partial")
            function = function.func


def _in_context(variable: ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return None


def _empty(entry: Guard) -> bool:
    """True where nothing was in a place."""
    return entry.value is None or entry.value is MISSING


def _shown(value: Any) -> Any:
    """The dict behind a view of one, the items of a weak container, the value in shared memory; else the value."""
    kind = type(value)  # and not what a class of the user's may say that it is
    if kind in _VIEWS:
        return next((each for each in gc.get_referents(value) if hasattr(each, "items")), value)
    if issubclass(kind, _WEAK):
        return value.data
    if kind.__module__ == "multiprocessing.sharedctypes":
        return value.get_obj()
    return value
