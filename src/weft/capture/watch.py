"""Values of Python that a step was captured with, to be compared before every step."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import is_, itemgetter
from typing import Any, TypeAlias

import numpy as np
import torch

# Values that are compared themselves; of others, only whether they are the same object.
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(enum.Enum, np.generic, torch.dtype, torch.device),
)
MISSING = object()
Space: TypeAlias = Any  # with `get(name, default)`


@dataclass(frozen=True, slots=True)
class Entry:
    """A value that was read: `space.get(name)` gives what it is now; `text` is how the user calls it."""

    space: Space
    name: Any
    value: Any
    text: str

    def holds(self) -> bool:
        """Whether it is what it was."""
        value = self.space.get(self.name, MISSING)
        return value is self.value or _same(value, self.value)

    @property
    def now(self) -> str:
        """What it is at present."""
        value = self.space.get(self.name, MISSING)
        return "gone" if value is MISSING else _shown(value)

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
        self._readers = [
            (reader([entry.name for entry in group]), group[0].space) for group in groups.values()
        ]
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


class Cell:
    """A variable of a closure, with the `get` of a dict."""

    def __init__(self, cell: Any) -> None:
        self.key = id(cell)
        self._cell = cell

    def get(self, _name: str, default: Any) -> Any:
        try:
            return self._cell.cell_contents
        except ValueError:
            return default


class Items:
    """A list, with the `get` of a dict."""

    def __init__(self, items: list[Any]) -> None:
        self.key = id(items)
        self._items = items

    def get(self, number: int, default: Any) -> Any:
        return self._items[number] if number < len(self._items) else default


def reader(names: Sequence[Any]) -> Callable[[Any], Iterable[Any]]:
    """Reads the values of names from a dict, in order; a KeyError when one is gone."""
    if len(names) == 1:
        name = names[0]
        return lambda space: (space[name],)
    return itemgetter(*names)


def _same(one: Any, other: Any) -> bool:
    """Whether plain values are equal; a number is no flag, and nan is nan."""
    if type(one) is not type(other) or not isinstance(one, (*PLAIN, tuple)):
        return False
    return bool(one == other) or repr(one) == repr(other)


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} (number {id(value):x})"
    return repr(value)[:80]
