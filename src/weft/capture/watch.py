"""Values of Python that a step was captured with: what the trace read, to be compared before every step.

A captured step holds numbers, flags and texts as they were. Watched are the attributes of modules that
the trace read, the globals and variables of closures that the user's functions name, and what lies
directly in the dicts, lists and objects found there.
"""

from __future__ import annotations

import enum
import random
import sys
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from typing import Any, TypeAlias

import torch
from torch import nn

from weft.capture.locations import in_library, installed
from weft.capture.reached import globals_of, names_in, plain_function, seen_by
from weft.errors import CaptureError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), enum.Enum, torch.dtype, torch.device)
# Up to which size what lies in a container is watched.
_MANY = 200
_MISSING = object()
# Attributes that every module has for itself; of them, `training` alone is the user's.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}
_Space: TypeAlias = Any  # with `get(name, default)`


@dataclass(frozen=True, slots=True)
class Entry:
    """A value that was read: `space.get(name)` gives what it is now; `text` is how the user calls it."""

    space: _Space
    name: Any
    value: Any
    text: str

    def holds(self) -> bool:
        """Whether it is what it was."""
        value = self.space.get(self.name, _MISSING)
        return value is self.value or _same(value, self.value)

    @property
    def now(self) -> str:
        """What it is at present."""
        value = self.space.get(self.name, _MISSING)
        return "gone" if value is _MISSING else _shown(value)

    @property
    def then(self) -> str:
        """What it was when the step was captured."""
        return _shown(self.value)


class Watch:
    """The values that a captured step depends on, each once."""

    def __init__(self, entries: tuple[Entry, ...] = ()) -> None:
        self.entries = entries
        groups: dict[int, list[Entry]] = {}
        for entry in entries:
            if isinstance(entry.space, dict):
                groups.setdefault(id(entry.space), []).append(entry)
        # How all values of a space are read at once, and what all of them were.
        self._readers = [(_reader(group), group[0].space) for group in groups.values()]
        self._then = [entry.value for group in groups.values() for entry in group]
        self._others = [entry for entry in entries if not isinstance(entry.space, dict)]

    def changed(self) -> Entry | None:
        """The first value that is another one now."""
        for entry in self._others:
            if not entry.holds():
                return entry
        try:
            now = chain.from_iterable([read(space) for read, space in self._readers])
            if all(map(is_, now, self._then)):
                return None
        except KeyError:
            pass
        return next((entry for entry in self.entries if not entry.holds()), None)


class Recorder:
    """Collects what a trace reads."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        modules = list(model.named_modules())
        self._paths = {id(module): path for path, module in modules}
        self._before = {id(module): dict(vars(module)) for _, module in modules}
        self._spaces = [vars(module) for _, module in modules]
        self._seen: set[tuple[int, Any]] = set()
        self._entries: list[Entry] = []
        self._functions(function, modules)

    @contextmanager
    def recording(self) -> Iterator[None]:
        """While this lasts, reading an attribute of a module of the model is noted.

        Raises:
            CaptureError: when Python's or numpy's random numbers were drawn.
        """
        states = _random_states()

        def reading(module: nn.Module, name: str) -> Any:
            value = object.__getattribute__(module, name)
            before = self._before.get(id(module))
            if before is not None and name not in _INTERNAL and before.get(name, _MISSING) is value:
                path = self._paths[id(module)]
                self._note(vars(module), name, value, f"{path}.{name}" if path else name)
            return value

        nn.Module.__getattribute__ = reading  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
        if _random_states() != states:
            raise CaptureError(
                "the step draws from Python's or numpy's random numbers, but is captured once; draw by torch.rand "
                "and the like, or outside, and pass what was drawn in the batch"
            )

    def watch(self) -> Watch:
        """What was read.

        Call it before what the step wrote is put back.

        Raises:
            CaptureError: when the step changes a number, flag or text that it has read.
        """
        kept = []
        for entry in self._entries:
            now = entry.space.get(entry.name, _MISSING)
            if entry.holds():
                kept.append(entry)
            elif (
                isinstance(now, _PLAIN)
                and isinstance(entry.value, _PLAIN)
                and entry.value is not None
            ):
                raise CaptureError(
                    f"the step changes {entry.text} from {entry.then} to {entry.now}, and reads it: captured once, it "
                    "would read the same value for ever. Keep it in a tensor (register_buffer, and write it in "
                    "place), or outside of the step and pass it in the batch"
                )
        return Watch(tuple(kept))

    def caches(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that the step put in attributes where it had read none, or another one, and their names."""
        spaces = {id(space) for space in self._spaces}
        read = [
            each
            for each in self._entries
            if isinstance(each.value, torch.Tensor | None) and id(each.space) in spaces
        ]
        found = [(each.text, each.space.get(each.name, None), each.value) for each in read]
        return [
            (text, now)
            for text, now, then in found
            if isinstance(now, torch.Tensor) and now is not then
        ]

    def _note(self, space: Any, name: Any, value: Any, text: str) -> None:
        """Watch a value, and what lies directly in it."""
        if (id(space), name) in self._seen:
            return
        self._seen.add((id(space), name))
        plain = isinstance(value, tuple) and all(isinstance(part, _PLAIN) for part in value)
        if plain or isinstance(value, (*_PLAIN, torch.Tensor, types.FunctionType)):
            self._entries.append(Entry(space, name, value, text))
        elif isinstance(value, dict):
            self._inside(value, value, text + "[{!r}]")
        elif isinstance(value, list):
            self._inside(_Items(value), dict(enumerate(value)), text + "[{!r}]")
        elif not isinstance(value, nn.Module | type | types.ModuleType):
            own = getattr(value, "__dict__", None)
            if isinstance(own, dict):
                self._inside(own, own, text + ".{}")

    def _inside(self, space: _Space, held: Mapping[Any, Any], text: str) -> None:
        """Watch what is plain in a container."""
        if len(held) > _MANY or (id(space), _MISSING) in self._seen:
            return
        self._seen.add((id(space), _MISSING))
        self._entries += [
            Entry(space, name, value, text.format(name))
            for name, value in held.items()
            if isinstance(value, _PLAIN)
        ]

    def _functions(self, function: Any, modules: list[tuple[str, nn.Module]]) -> None:
        """Watch what the user's functions name: the loss function, forwards, and what they call by name."""
        classes = {type(module): None for _, module in modules}
        waiting = [function, *(each.forward for each in classes)]
        seen: set[int] = set()
        while waiting:
            plain = plain_function(waiting.pop())
            if plain is None or id(plain) in seen or _foreign(plain):
                continue
            seen.add(id(plain))
            for space, name in globals_of(plain):
                self._name(space, name, f"the global {name}", waiting)
            for name, cell in zip(plain.__code__.co_freevars, plain.__closure__ or (), strict=True):
                self._name(
                    _Cell(cell), name, f"{name} in the closure of {plain.__qualname__}", waiting
                )
            methods = [
                vars(each).get(name) for each in classes for name in names_in(plain.__code__)
            ]
            waiting += [each for each in methods if isinstance(each, types.FunctionType)]
        for each in seen_by(function):
            if not isinstance(each, (*_PLAIN, types.FunctionType, torch.Tensor)):
                self._note({}, id(each), each, type(each).__name__)

    def _name(self, space: Any, name: str, text: str, waiting: list[Any]) -> None:
        value = space.get(name, _MISSING)
        if isinstance(value, types.FunctionType):
            waiting.append(value)
        if value is not _MISSING and not isinstance(value, types.ModuleType):
            self._note(space, name, value, text)


class _Cell:
    """A variable of a closure, with the `get` of a dict."""

    def __init__(self, cell: Any) -> None:
        self._cell = cell

    def get(self, _name: str, default: Any) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return default


class _Items:
    """A list, with the `get` of a dict."""

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    def get(self, number: int, default: Any) -> Any:
        return self._items[number] if number < len(self._items) else default


def _reader(entries: Sequence[Entry]) -> Callable[[Any], Iterable[Any]]:
    """Reads the values of entries from their space, in order; a KeyError when one is gone."""
    if len(entries) == 1:
        name = entries[0].name
        return lambda space: (space[name],)
    return itemgetter(*[entry.name for entry in entries])


def _same(one: Any, other: Any) -> bool:
    """Whether plain values are equal; a number is no flag, and nan is nan."""
    if type(one) is not type(other) or not isinstance(one, (*_PLAIN, tuple)):
        return False
    return bool(one == other) or repr(one) == repr(other)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} (number {id(value):x})"
    return repr(value)[:80]


def _foreign(function: types.FunctionType) -> bool:
    """Whether a function is not the user's own."""
    file = function.__code__.co_filename
    return in_library(file) or installed(file)


def _random_states() -> tuple[str, ...]:
    numpy = sys.modules.get("numpy")
    own = (repr(random.getstate()),)
    return own if numpy is None else (*own, repr(numpy.random.get_state()[1:3]))
