"""Places that a trace has read, to be compared; and what containers hold, wherever they lie.

Whatever an item is, the item itself is noted (numbers by value, other objects by identity), then what lies in it. For
a dict that the code reads only by literal keys, only the items under these keys are compared.
"""

from __future__ import annotations

import argparse
import configparser
import types
from abc import ABC, abstractmethod
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Mapping
from functools import partial
from inspect import unwrap
from typing import Any

from weft.capture.numbers.symbolic import is_symbolic
from weft.capture.python.reachable import Keys
from weft.capture.python_guards import (
    MISSING,
    PLAIN,
    Guard,
    QueriedValue,
    is_plain,
    question_guard,
    size_guard,
)
from weft.files import users_module

# Up to which size all items of a container are noted, how many items of all, and how many containers deep.
_MANY, _ALL, _DEEP = 2000, 20_000, 20
CONTAINERS = (dict, list, deque, set, frozenset, tuple)
_MAPPINGS = (UserDict, UserList, ChainMap, configparser.RawConfigParser)
# Objects of libraries that only hold what the user gives them.
HOLDERS = (types.SimpleNamespace, argparse.Namespace, *_MAPPINGS)
# Dicts whose methods read no more than those of a plain one.
_PLAIN_DICTS = (dict, OrderedDict, defaultdict)
# How a function reads attributes of an object under names that it makes.
_BY_MADE_NAMES = frozenset(["vars", "__dict__", "getattr"])


class Containers(ABC):
    """The values that a trace has come across, and the containers among them.

    Attributes:
        entries: all that is to be compared.
        read: those of attributes, of which it is known that they were read.
        beside: plain values under names that no function names: not compared before a step, but behind the trace.
        keys: of dicts that the step's functions read.
        named: all that these functions name.
    """

    def __init__(self) -> None:
        self.entries: list[Guard] = []
        self.read: list[Guard] = []
        self.beside: list[Guard] = []
        self.keys = Keys()
        self.named: frozenset[str] = frozenset()
        self._added: set[tuple[int, Any]] = set()
        # Containers, kept alive, and what was known of the step's functions when their items were noted.
        self._walked: dict[int, tuple[Any, bool, tuple[int, int]]] = {}
        self._deep = self._noted = 0
        # Dicts in which looking up makes items, by id: with the keys that they had, and the user's name.
        self._making: dict[int, tuple[defaultdict[Any, Any], frozenset[Any], str]] = {}

    @abstractmethod
    def inside(self, value: Any, text: str, name: str | None = None, written: bool = True) -> None:
        """Watch what is in a value.

        Args:
            value: of any kind.
            text: the user's name of it.
            name: the last name that leads to it; None where it is reached without one.
            written: False where something on the way to it is not read by keys in the code.
        """

    def add(self, entry: Guard, read: bool = False) -> None:
        """Watch a value; `read` where it is known that the step has read it."""
        if is_symbolic(entry.value):
            return
        if entry.key not in self._added:
            self._added.add(entry.key)
            self.entries.append(entry)
        if read:
            self.read.append(entry)

    def put(self, space: Any, name: Any, value: Any, text: str, written: bool = True) -> None:
        """Watch a value, and what is in it."""
        self.add(Guard(space, name, value, text))
        self.inside(value, text, name if isinstance(name, str) else None, written)

    def walk(self, value: Any, text: str, name: str | None, written: bool) -> None:
        """Note what a container holds, or an object of which it is not noted what is read; see `inside`."""
        written = written and self._by_written_keys(value, name)
        known = (len(self.named), len(self.keys))
        _, as_written, then = self._walked.get(id(value), (None, True, None))
        if self._deep >= _DEEP or (then == known and (written or not as_written)):
            return
        self._walked[id(value)] = value, written, known
        self._deep += 1
        try:
            self._hold(value, text, written)
        finally:
            self._deep -= 1

    def looked_up(self) -> list[Guard]:
        """Plain items that the step has made by looking them up: until they are there, the same is made again."""
        return [
            question_guard(
                None, partial(held.get, name, held[name]), f"{text}[{name!r}]", equal=False
            )
            for held, before, text in self._making.values()
            for name in [x for x in held if x not in before and is_plain(held[x])][:_MANY]
        ]

    def _by_written_keys(self, value: Any, name: str | None) -> bool:
        """True where only items under keys that stand in the code are read of a container or object."""
        if isinstance(value, dict):
            plain = type(value) in _PLAIN_DICTS and self.keys.written(name)
            return plain and self._names_any(value)
        if isinstance(value, _MAPPINGS):
            return False
        if isinstance(value, HOLDERS):
            return self.named.isdisjoint(_BY_MADE_NAMES) and self._names_any(attributes(value))
        return True

    def _names_any(self, held: Iterable[Any]) -> bool:
        return not self.named.isdisjoint([key for key in held if isinstance(key, str)])

    def _hold(self, value: Any, text: str, written: bool) -> None:
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
                self._order(own, f"items of {text}")

    def _dict(self, held: dict[Any, Any], text: str, written: bool) -> None:
        self._items(held, held, text + "[{!r}]", written)
        if isinstance(held, defaultdict):
            self._making.setdefault(id(held), (held, frozenset(held), text))
            for name in sorted(self.named - held.keys()):
                self.add(Guard(held, name, MISSING, f"{text}[{name!r}]"))
        if not written:
            self._order(held, f"items of {text}")

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

    def _order(self, held: dict[Any, Any], text: str) -> None:
        """Note the order of items, which who goes over them sees."""
        if 1 < len(held) <= _MANY and is_plain(tuple(held)):
            keys = QueriedValue(held, partial(list, held))
            self.add(Guard(keys, list, list(held), f"the order of {text}"))

    def _set(self, members: Iterable[Any], text: str, written: bool) -> None:
        kept = frozenset(members)
        if len(kept) > _MANY:
            return
        if isinstance(members, set):
            self.add(Guard(QueriedValue(members, partial(frozenset, members)), set, kept, text))
        for each in kept:
            self.inside(each, f"a member of {text}", None, written)


def attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object that are in a dict."""
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else {}


def has_own_reads(cls: type) -> bool:
    """True where a class of the user's says itself what reading an attribute gives."""
    return users_module(getattr(unwrap(cls.__getattribute__), "__module__", None) or "builtins")
