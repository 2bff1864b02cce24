"""What a trace reads of Python, so that it can be compared before every step (`weft.capture.watch`).

That is: attributes of modules that are read; globals and variables of closures that the user's own
functions name; and, up to three dicts, lists or objects deep, what these functions name there.
"""

from __future__ import annotations

import random
import sys
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from weft.capture.reached import (
    bound_to,
    cells_of,
    globals_of,
    is_users,
    names_in,
    user_functions,
)
from weft.capture.watch import MISSING, PLAIN, Cell, Entry, Items, Space, Watch
from weft.errors import CaptureError

# Up to which size the items of a list are watched, and how many containers or objects deep.
_MANY, _DEPTH = 200, 3
# Attributes that every module has for itself; of them, `training` alone is the user's.
_INTERNAL = frozenset(vars(nn.Module())) - {"training"}


class Recorder:
    """Collects what the trace of one step reads."""

    def __init__(self, model: nn.Module, function: Callable[..., Any]) -> None:
        modules = list(model.named_modules())
        self._paths = {id(module): path for path, module in modules}
        self._before = {id(module): dict(vars(module)) for _, module in modules}
        self._seen: set[tuple[int, Any]] = set()
        self._entries: list[Entry] = []
        # Those of attributes, of which it is known that they were read.
        self._read: list[Entry] = []
        functions = user_functions(function, model)
        self._named = frozenset[str]().union(*(names_in(each.__code__) for each in functions))
        for each in functions:
            self._function(each)
        for owner in bound_to(function):
            if not isinstance(owner, nn.Module):
                self._inside(owner, type(owner).__name__)

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
            if before is not None and name not in _INTERNAL and before.get(name, MISSING) is value:
                path = self._paths[id(module)]
                self._attribute(module, name, value, f"{path}.{name}" if path else name)
            return value

        nn.Module.__getattribute__ = reading  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            del nn.Module.__getattribute__
        if _random_states() != states:
            raise CaptureError(
                "Python's or numpy's random numbers were drawn while the step was captured, once for all steps; draw "
                "by torch.rand and the like, or outside, and pass what was drawn in the batch"
            )

    def watch(self) -> Watch:
        """What is to be compared before every step.

        Call it before what the step wrote is put back.

        Raises:
            CaptureError: when the step changes a number, flag or text that it has read.
        """
        read = {(id(entry.space), entry.name) for entry in self._read}
        for entry in self._entries:
            now = entry.space.get(entry.name, MISSING)
            plain = isinstance(now, PLAIN) and isinstance(entry.value, PLAIN)
            if (
                (id(entry.space), entry.name) in read
                and plain
                and entry.value is not None
                and not entry.holds()
            ):
                raise CaptureError(
                    f"the step changes {entry.text} from {entry.then} to {entry.now}, and reads it: captured once, it "
                    "would read the same value for ever. Keep it in a tensor (register_buffer, and write it in "
                    "place), or outside of the step and pass it in the batch"
                )
        return Watch(tuple(entry for entry in self._entries if entry.holds()))

    def caches(self) -> list[tuple[str, torch.Tensor]]:
        """The tensors that the step put in attributes where it had read none, or another one, and their names."""
        found = []
        for entry in self._read:
            now = entry.space.get(entry.name, None)
            kept = isinstance(entry.value, torch.Tensor | None) and isinstance(now, torch.Tensor)
            if kept and now is not entry.value:
                found.append((entry.text, now))
        return found

    def _attribute(self, module: nn.Module, name: str, value: Any, text: str) -> None:
        """An attribute that was read."""
        entry = self._note(vars(module), name, value, text)
        if entry is not None:
            self._read.append(entry)
        elif is_users(type(module).forward):
            self._inside(value, text)

    def _function(self, function: types.FunctionType) -> None:
        """What a function of the user's names."""
        for space, name in globals_of(function):
            self._name(space, name, f"the global {name}")
        for name, cell in cells_of(function):
            self._name(Cell(cell), name, f"{name} in the closure of {function.__qualname__}")

    def _name(self, space: Space, name: str, text: str) -> None:
        value = space.get(name, MISSING)
        if value is not MISSING and self._note(space, name, value, text) is None:
            self._inside(value, text)

    def _note(self, space: Space, name: Any, value: Any, text: str) -> Entry | None:
        """Watch a value by itself, if it is one that can be."""
        plain = isinstance(value, tuple) and all(isinstance(part, PLAIN) for part in value)
        if not plain and not isinstance(value, (*PLAIN, torch.Tensor, types.FunctionType)):
            return None
        entry = Entry(space, name, value, text)
        self._add(entry)
        return entry

    def _add(self, entry: Entry) -> None:
        own = entry.space.key if isinstance(entry.space, Cell | Items) else id(entry.space)
        if (own, entry.name) not in self._seen:
            self._seen.add((own, entry.name))
            self._entries.append(entry)

    def _inside(self, value: Any, text: str, depth: int = _DEPTH) -> None:
        """Watch what is plain in a container or object, of that what the user's functions name."""
        if not depth:
            return
        if isinstance(value, dict):
            self._items(value, value, text + "[{!r}]", depth)
        elif isinstance(value, list) and len(value) <= _MANY:
            self._items(Items(value), dict(enumerate(value)), text + "[{!r}]", depth)
        elif not isinstance(value, nn.Module | type | types.ModuleType | torch.Tensor):
            own = getattr(value, "__dict__", None)
            if isinstance(own, dict):
                self._items(own, own, text + ".{}", depth)

    def _items(self, space: Space, held: Mapping[Any, Any], text: str, depth: int) -> None:
        for name, value in list(held.items()):
            if isinstance(name, str) and name not in self._named:
                continue
            if isinstance(value, PLAIN):
                self._add(Entry(space, name, value, text.format(name)))
            else:
                self._inside(value, text.format(name), depth - 1)


def _random_states() -> tuple[str, ...]:
    numpy = sys.modules.get("numpy")
    own = (repr(random.getstate()),)
    return own if numpy is None else (*own, repr(numpy.random.get_state()[1:3]))
