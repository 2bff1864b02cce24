"""A trace's reads of Python, recorded to be compared before every step (`weft.capture.watch`).

That is: attributes of modules that are read, those of classes and those that were looked for and not there included;
which modules, parameters and buffers each module has; globals and variables of closures that the user's own
functions name; and, up to three dicts, lists or objects deep, what these functions name there.
"""

from __future__ import annotations

import array
import sys
import types
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from typing import Any, final
from weakref import ReferenceType

import numpy as np
import torch
from torch import nn

from weft.capture.numbers.changing import is_changing
from weft.capture.numbers.later import is_later
from weft.capture.python.caches import Cache
from weft.capture.python.changes import Moving, randomness_refused
from weft.capture.python.contents import CONTAINERS, HOLDERS, Contents, Keys
from weft.capture.python.objects import BYTES, Objects, has_own_reads, shown
from weft.capture.python.reached import (
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
from weft.capture.python.values import values_of
from weft.capture.watch import (
    FUNCTIONS,
    MISSING,
    PLAIN,
    Asked,
    Attribute,
    Cell,
    Entry,
    Outcome,
    Size,
    Space,
    Watch,
    is_plain,
)
from weft.errors import CaptureError
from weft.files import users_module

# Attributes that every module has for itself; of them, `training` alone is the user's.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_PARTS = ("modules", "parameters", "buffers")
# What optimizers and schedulers keep in groups beside hyperparameters.
_OF_GROUPS = ("params", "param_names", "initial_lr")
# Of whose classes nothing is watched.
_LIBRARIES = frozenset(["torch", "builtins", "weft", "types", "collections", "numpy"])


_SET = (
    "Set it before weft.compile, as in the model's config, or call the model once before, where it stays from then on; "
    "or pass it in the batch"
)
_KEEP = "Keep it in a tensor (register_buffer, and write it in place), or outside of the step and pass it in the batch"


@final
class PythonRecorder:
    """Collects what the trace of one step reads.

    Attributes:
        counted: True once the step was refused, as it changes what it has read.
    """

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        modules = list(model.named_modules())
        self.counted = False
        self._paths = {id(module): path for path, module in modules}
        self._before = {id(module): dict(vars(module)) for _, module in modules}
        self._objects = Objects(self)
        self._keys = Keys()
        self._contents = Contents(self, self._keys)
        self._moving = Moving()
        self._visited: set[int] = set()
        # Modules that are none of the model's, kept alive; of those in `_unread` nothing was read yet.
        self._others: dict[int, nn.Module] = {}
        self._unread: set[int] = set()
        # Those of which attributes are watched, with the user's names of them.
        self._tensors: dict[int, tuple[torch.Tensor, str]] = {}
        # Those whose values Python reads.
        self._valued: dict[int, torch.Tensor] = {}
        self._spaces: dict[type, Mapping[str, Any]] = {}
        self._seen: set[tuple[int, Any]] = set()
        self._entries: list[Entry] = []
        # Those of attributes, of which it is known that they were read.
        self._read: list[Entry] = []
        # What classes have for attributes that the step may set in their instances.
        self._defaults: dict[tuple[int, Any], Any] = {}
        functions = user_functions(function, model)
        self._named = frozenset[str]().union(*(names_in(each.__code__) for each in functions))
        self._asked = frozenset[str]().union(*(asked_in(each.__code__) for each in functions))
        for each in functions:
            self._keys.add(each.__code__)
        for path, module in modules:
            self._parts(module, path)
        dtype = torch.get_default_dtype
        self.add(Entry(Asked(dtype, dtype), "dtype", dtype(), "torch.get_default_dtype()"))
        for each in functions:
            self.function(each)
        for path, module in modules:
            self._attributes(module, path)
        for called in (function, *hooks_of(model)):
            for owner in bound_to(called):
                if not isinstance(owner, nn.Module):
                    self.inside(owner, type(owner).__name__)
            self._keywords(called)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While this lasts, reading an attribute of a module of the model is noted; Python draws no random numbers."""

        def reading(module: nn.Module, name: str) -> Any:
            if id(module) in self._unread:
                self._unread.discard(id(module))
                self._parts(module, self._paths[id(module)])
            own = name in _INTERNAL or name.startswith("__")
            before = None if own else self._before.get(id(module))
            if before is not None and name not in before:
                self._objects.looked_up(type(module), name)
            try:
                value = object.__getattribute__(module, name)
            except AttributeError:
                if before is not None:
                    self._absent(module, name)
                raise
            if before is not None and name not in before:
                self.inherited(module, vars(module), name, self._paths[id(module)])
            elif before is not None and before[name] is value:
                self._attribute(module, name, value, self._text(module, name))
            return value

        nn.Module.__getattribute__ = reading  # type: ignore[method-assign, assignment]
        try:
            with randomness_refused(), self._objects.reading():
                yield
        finally:
            del nn.Module.__getattribute__

    def watch(self) -> Watch:
        """The values that are to be compared before every step.

        Call it before what the step wrote is put back.

        Raises:
            CaptureError: when the step changes a number, flag or text that it has read.
        """
        read = {entry.key for entry in self._read}
        for entry in self._entries:
            now = entry.value_now
            before = entry.value
            if before is MISSING:
                before = self._defaults.get(entry.key, MISSING)
            plain = isinstance(now, PLAIN) and isinstance(before, PLAIN)
            if entry.key in read and plain and before is not None and not entry.holds():
                then = replace(entry, value=before).then
                self.counted = True
                raise CaptureError(
                    f"the step changes {entry.text} from {then} to {entry.now}, and reads it: captured once, it "
                    f"would read the same value for ever. {_SET if isinstance(now, str) else _KEEP}"
                )
        held = [entry for entry in self._entries if entry.holds()]
        # Looking up made them.
        held += [replace(e, value=e.value_now) for e in self._entries if _by_default(e)]
        held += self._contents.looked_up()
        # What the step makes where there was nothing is put back to nothing.
        empty = [entry for entry in self._entries if entry.value is None or entry.value is MISSING]
        made = [replace(entry, made=True) for entry in empty if not entry.holds()]
        return Watch((*held, *made))

    def changes(self) -> list[Entry]:
        """The values that the step has changed and could have read, as they were; tensors and what it makes apart.

        Raises:
            CaptureError: when it has drawn random numbers of Python, or has advanced an iterator.
        """
        self._moving.check()
        read = {entry.key for entry in self._read}
        found: list[Entry] = []
        for entry in (*self._entries, *self._contents.beside):
            made = entry.key in read and (entry.value is None or entry.value is MISSING)
            now = entry.value_now
            later = isinstance(now, torch.Tensor) or is_later(now)
            if not made and not later and not entry.holds() and not _by_default(entry):
                found.append(entry)
        return [*found, *self._moving.unknown()]

    def caches(self) -> list[Cache]:
        """The tensors that the step put in attributes where it had read none, or another one."""
        found = []
        for entry in self._read:
            now = entry.space.get(entry.name, None)
            kept = entry.value is MISSING or isinstance(entry.value, torch.Tensor | None)
            if kept and isinstance(now, torch.Tensor) and now is not entry.value:
                before = entry.value if isinstance(entry.value, torch.Tensor) else None
                found.append(Cache(entry.text, now, before))
        return found

    def made(self) -> list[Entry]:
        """Numbers that the step made where it had read none, as they are after it."""
        found = []
        for entry in self._read:
            now = entry.value_now
            nothing = entry.value is None or entry.value is MISSING
            if nothing and isinstance(now, int | float):
                found.append(replace(entry, value=now))
        return found

    def _text(self, module: nn.Module, name: str) -> str:
        path = self._paths[id(module)]
        return f"{path}.{name}" if path else name

    def _parts(self, module: nn.Module, path: str) -> None:
        """Note the modules, parameters and buffers of a module."""
        where = path or type(module).__name__
        for kind, part in zip(_PARTS, _parts_of(module), strict=True):
            self._size(part, f"{kind} of {where}")
            for name, value in part.items():
                # Of the model's own, others are refused (`weft.program.live.places`).
                if value is None or id(module) in self._others:
                    self.add(Entry(part, name, value, self._text(module, name)))
            if len(part) > 1 and id(module) in self._others:
                order = partial(_order, part)
                text = f"the order of {kind} of {where}"
                self.add(Entry(Asked(order, order), "order", order(), text))

    def _attributes(self, module: nn.Module, path: str) -> None:
        """Watch what the user has put on the tensors of a module."""
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                self._on_tensor(tensor, f"{path}.{name}" if path else name)

    def _on_tensor(self, tensor: torch.Tensor, text: str) -> None:
        """Watch what the user has put on a tensor, and what functions ask for there."""
        if id(tensor) in self._tensors:
            return
        self._tensors[id(tensor)] = tensor, text
        own = vars(tensor)
        for key, value in user_attributes(tensor).items():
            self.add(Entry(Attribute(tensor), key, value, f"{text}.{key}"))
            self.inside(value, f"{text}.{key}", key)
        for key in self._asked:
            if key not in own and not hasattr(torch.Tensor, key):
                self.add(Entry(Attribute(tensor), key, MISSING, f"{text}.{key}"))

    def values(self, tensor: torch.Tensor) -> None:
        """Watch the values of a tensor from outside, which Python reads."""
        if id(tensor) in self._valued:
            return
        self._valued[id(tensor)] = tensor
        _, text = self._tensors.get(id(tensor), (tensor, f"a tensor {list(tensor.shape)}"))
        values = partial(values_of, tensor)
        self.add(Entry(Outcome(values), "values", values(), f"the values of {text}"))

    def _attribute(self, module: nn.Module, name: str, value: Any, text: str) -> None:
        """An attribute that was read."""
        users = is_users(type(module).forward) or users_module(type(module).__module__)
        given = users or self._may_be_given(name, value)
        if given or _alone(value):
            self.add(Entry(vars(module), name, value, text), read=True)
        if given:
            self.inside(value, text, name)
        elif not _alone(value):
            self._objects.see(value, text, users=False)

    def _may_be_given(self, name: str, value: Any) -> bool:
        """True where the user may have put a value on a module of a library."""
        private = name.startswith("_") and name not in self._named
        kinds = (*CONTAINERS, *HOLDERS, nn.Module, np.ndarray, *FUNCTIONS, torch.optim.Optimizer)
        own = isinstance(value, kinds) or users_module(type(value).__module__)
        return own and not private

    def _absent(self, module: nn.Module, name: str) -> None:
        """An attribute that was looked for in a module, which has none, or has a part of that name."""
        parts = [part for part in _parts_of(module) if name in part]
        if not parts:
            self.inherited(module, vars(module), name, self._paths[id(module)])
        for part in parts:
            empty = part[name] is None  # which the step may fill
            if empty or id(module) in self._others:
                self.add(Entry(part, name, part[name], self._text(module, name)), read=empty)

    def inherited(self, owner: Any, own: dict[str, Any], name: str, text: str) -> None:
        """An attribute that was read of an object's class, that of the class, and that the object has none.

        Or one that was looked for and is nowhere.
        """
        entry = Entry(own, name, MISSING, f"{text}.{name}" if text else name)
        value = self.of_class(type(owner), name)
        if value is MISSING and hasattr(nn.Module, name):
            return
        if value is MISSING:
            for cls in type(owner).__mro__:
                if cls is not object:
                    self.add(Entry(self._space(cls), name, MISSING, f"{cls.__name__}.{name}"))
        elif hasattr(type(value), "__set__"):
            return
        else:
            self._defaults[entry.key] = value
        self.add(entry, read=True)

    def of_class(self, owner: type, name: str) -> Any:
        """Watch what a class has under a name, `nn.Module` excepted, and that classes before it have nothing."""
        spaces: list[tuple[type, Space]] = []
        for cls in owner.__mro__:
            if cls in (nn.Module, object):
                break
            spaces.append((cls, self._space(cls)))
            if name in spaces[-1][1]:
                for each, space in spaces:
                    text = f"{each.__name__}.{name}"
                    self.add(Entry(space, name, space.get(name, MISSING), text))
                value = spaces[-1][1][name]
                self.inside(value, text, name)
                return value
        return MISSING

    def _space(self, cls: type) -> Mapping[str, Any]:
        """The attributes of a class, each time the same object."""
        return self._spaces.setdefault(cls, vars(cls))

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
        self._default_arguments(plain)
        self._named |= names_in(plain.__code__)
        self._keys.add(plain.__code__)
        for name in sorted(vars(plain).keys() - {"__wrapped__"}):
            self._name(vars(plain), name, f"{plain.__qualname__}.{name}")
        self._asked |= asked_in(plain.__code__)
        if "initial_seed" in names_in(plain.__code__):
            seed = Outcome(torch.initial_seed)
            self.add(Entry(seed, "seed", seed.compute(), "torch.initial_seed()"))
        names, cells = globals_of(plain), cells_of(plain)
        for space, name in names:
            self._name(space, name, f"the global {name}")
        for name, cell in cells:
            self._name(Cell(cell), name, f"{name} in the closure of {plain.__qualname__}")
        self._above(plain, dict(cells).get("__class__"))
        held = [space.get(name) for space, name in names]
        self._objects.named_by(plain, [*held, *(cell.cell_contents for _, cell in cells)])
        self._objects.named_since(self._named)

    def _keywords(self, function: Any) -> None:
        """Watch the arguments that partials give by name."""
        while isinstance(function, partial):
            named = function.keywords
            self._size(named, "keywords of a partial")
            for name, value in named.items():
                self.add(Entry(named, name, value, f"the keyword {name} of a partial"))
                self.inside(value, f"the keyword {name} of a partial", name)
            function = function.func

    def _default_arguments(self, function: types.FunctionType) -> None:
        """Watch the values of arguments that are not given."""
        text = f"of {function.__qualname__}"
        if function.__defaults__:
            defaults = Entry(Attribute(function), "__defaults__", function.__defaults__, text)
            self.add(replace(defaults, text=f"the defaults {text}"))
        for name, value in (function.__kwdefaults__ or {}).items():
            self.add(Entry(function.__kwdefaults__, name, value, f"the default of {name} {text}"))

    def _above(self, function: types.FunctionType, cell: Any) -> None:
        """Watch what a method names of the classes that `super()` looks in; `cell` holds its own class."""
        if cell is not None and "super" in function.__code__.co_names:
            for base in cell.cell_contents.__bases__:
                for name in sorted(names_in(function.__code__)):
                    self.of_class(base, name)

    def _name(self, space: Space, name: str, text: str) -> None:
        value = space.get(name, MISSING)
        if value is not MISSING:
            self.add(Entry(space, name, value, text))
            self.inside(value, text, name)

    def add(self, entry: Entry, read: bool = False) -> None:
        """Watch a value; `read` where it is known that the step has read it."""
        if is_changing(entry.value):
            return
        if entry.key not in self._seen:
            self._seen.add(entry.key)
            self._entries.append(entry)
        if read:
            self._read.append(entry)

    def _size(self, items: Any, text: str) -> None:
        self.add(Entry(Size(items), len, len(items), f"the number of {text}"))

    def inside(self, value: Any, text: str, name: str | None = None, written: bool = True) -> None:
        """Watch what is in a value.

        Args:
            text: the user's name of it.
            name: the last name that leads to it; None where it is reached without one.
            written: False where something on the way to it is not read by keys in the code.
        """
        value = shown(value)
        if callable(value) and not isinstance(value, type | nn.Module):
            self.function(value)
        if isinstance(value, torch.Tensor):
            self._on_tensor(value, text)
        elif _alone(value) or self._moving.see(value, text):
            return
        elif isinstance(value, nn.Module):
            self._outside(value, text)
        elif isinstance(value, ReferenceType):
            self.add(Entry(Asked(value, lambda: value() is None), "gone", value() is None, text))
            self.inside(value(), text, name, written)
        elif not self._of_libraries(value, text):
            self._in_object(value, text, name, written)

    def _of_libraries(self, value: Any, text: str) -> bool:
        """Watch an object of Python, numpy or torch whose state is no attribute; False where it is none of them."""
        if isinstance(value, np.ndarray | array.array):
            self._objects.array(value, text)
        elif isinstance(value, BYTES):
            self.add(Entry(Asked(value, lambda: bytes(value)), "content", bytes(value), text))
        elif isinstance(value, ContextVar):
            self._context(value, text)
        elif isinstance(value, torch.optim.Optimizer):
            self._optimizer(value, text)
        elif isinstance(value, torch.optim.lr_scheduler.LRScheduler):
            rates = Outcome(lambda: list(value.get_last_lr()))
            self.add(Entry(rates, "rates", rates.compute(), f"the learning rates of {text}"))
        else:
            return False
        return True

    def _in_object(self, value: Any, text: str, name: str | None, written: bool) -> None:
        """Watch what a container holds, or an object: of the user's what is read, of others what functions name."""
        reads_noted = self._objects.see(value, text)
        container = isinstance(value, CONTAINERS)
        if reads_noted and has_own_reads(type(value)):  # which may pass by what is noted
            written = reads_noted = False
        if not container and (reads_noted or isinstance(value, type | types.ModuleType)):
            return
        self._contents.walk(value, text, name, written, self._named)
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and not container:
            self._instance(value, own, text)

    def _optimizer(self, optimizer: torch.optim.Optimizer, text: str) -> None:
        """Watch what the user has put on an optimizer and into its groups, and hyperparameters that functions name."""
        for number, group in enumerate(optimizer.param_groups):
            users = group.keys() - {*optimizer.defaults, *_OF_GROUPS}
            for name in sorted((self._named & group.keys() - {"params"}) | users):
                where = f"{text}.param_groups[{number}][{name!r}]"
                self.add(Entry(group, name, group[name], where))
                self.inside(group[name], where, name)
        own = vars(optimizer)
        for name in sorted(self._named & own.keys() - {"defaults", "state", "param_groups"}):
            if not name.startswith("_") and not isinstance(own[name], FUNCTIONS):
                self._name(own, name, f"{text}.{name}")

    def _context(self, variable: ContextVar[Any], text: str) -> None:
        """Watch what a variable of the context holds."""

        def ask() -> Any:
            try:
                return variable.get()
            except LookupError:
                return None

        self.add(Entry(Asked(variable, ask), "context", ask(), text))
        self.inside(ask(), text)

    def _outside(self, module: nn.Module, text: str) -> None:
        """Watch a module that is none of the model's, as those are."""
        for path, each in module.named_modules():
            if id(each) not in self._before:
                self._others[id(each)] = each
                self._unread.add(id(each))
                self._paths[id(each)] = f"{text}.{path}" if path else text
                self._before[id(each)] = dict(vars(each))

    def _instance(self, value: Any, own: dict[str, Any], text: str) -> None:
        """Watch what the user's functions name of the class of an object, and that it has what it has not."""
        cls = type(value)
        if cls.__module__.partition(".")[0] in _LIBRARIES:
            return
        seen = {name for each in cls.__mro__[:-1] for name in vars(each).keys() & self._named}
        for name in sorted(seen - own.keys()):
            found = self.of_class(cls, name)
            if not isinstance(found, FUNCTIONS) and not hasattr(type(found), "__set__"):
                self.add(Entry(own, name, MISSING, f"{text}.{name}"))
        for name in sorted(self._asked - seen - own.keys()):
            self.add(Entry(own, name, MISSING, f"{text}.{name}"))


def _by_default(entry: Entry) -> bool:
    """True for a plain item that the step has made by looking it up in a `defaultdict`."""
    made = entry.value is MISSING and isinstance(entry.space, defaultdict)
    return made and is_plain(entry.value_now)


def _order(part: dict[str, Any]) -> str:
    """The names in a dict, the same object for the same order."""
    return sys.intern(" ".join(part))


def _parts_of(module: nn.Module) -> tuple[dict[str, Any], ...]:
    return module._modules, module._parameters, module._buffers


def _alone(value: Any) -> bool:
    """True where a value has nothing inside that is to be watched."""
    if isinstance(value, tuple):
        return all(isinstance(part, PLAIN) for part in value)
    return isinstance(value, (*PLAIN, torch.Tensor, *FUNCTIONS))
