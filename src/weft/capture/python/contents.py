"""Contents of containers that a step reads, noted in depth, wherever the containers lie.

Whatever an item is, the item itself is noted (numbers by value, other objects by identity), then what lies in it. Of
a dict that is read by keys in the code alone, the items under these are.

Of a dict that is read by written keys alone, only the items under these are watched. Any other way of reading it
(`items()`, a loop, a key that is computed, handing the dict on) may read all of it.
"""

from __future__ import annotations

import argparse
import configparser
import dis
import types
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol, final

from weft.capture.numbers.changing import is_changing
from weft.capture.python.objects import has_own_reads
from weft.capture.watch import (
    MISSING,
    PLAIN,
    Asked,
    Entry,
    Items,
    KeyOrder,
    Members,
    Size,
    is_plain,
)

_NOISE = frozenset(
    ["CACHE", "PRECALL", "PUSH_NULL", "NOP", "EXTENDED_ARG", "COPY", "DUP_TOP", "DUP_TOP_TWO"]
)
_SUBSCRIPTS = frozenset(["BINARY_SUBSCR", "STORE_SUBSCR", "DELETE_SUBSCR"])
# Methods of dicts that read no more than the item under the key that they are given.
_OF_ONE_KEY = frozenset(["get", "pop", "setdefault", "__getitem__"])
_END = dis.Instruction(*[None] * len(dis.Instruction._fields))  # type: ignore[arg-type]


# Up to which size all items of a container are noted, how many items of all, and how many containers deep.
_MANY, _ALL, _DEEP = 2000, 20_000, 20
CONTAINERS = (dict, list, deque, set, frozenset, tuple)
# Objects of libraries that only hold what the user gives them.
HOLDERS = (
    types.SimpleNamespace,
    argparse.Namespace,
    UserDict,
    UserList,
    ChainMap,
    configparser.RawConfigParser,
)
# Dicts whose methods read no more than those of a plain one.
_PLAIN_DICTS = (dict, OrderedDict, defaultdict)
# How a function reads attributes of an object under names that it makes.
_BY_MADE_NAMES = frozenset(["vars", "__dict__", "getattr"])


class Inner(Protocol):
    """The receiver of what is found in containers."""

    def add(self, entry: Entry, read: bool = False) -> None:
        """A value."""

    def inside(self, value: Any, text: str, name: str | None = None, written: bool = True) -> None:
        """Note what is in a value.

        Args:
            text: the user's name of it.
            name: the last name that leads to it; None where it is reached without one.
            written: False where something on the way to it is not read by keys in the code.
        """


@final
@dataclass(frozen=True)
class _Walked:
    """A container, kept alive, and what was known of the step's functions when its items were noted."""

    container: Any
    written: bool
    known: tuple[int, int]


@final
class Contents:
    """The containers that a trace comes across.

    Args:
        notes: is told of the items.
        keys: that the step's functions read.
    """

    def __init__(self, notes: Inner, keys: Keys) -> None:
        self._notes, self._keys = notes, keys
        self._named: frozenset[str] = frozenset()
        self._walked: dict[int, _Walked] = {}
        self._deep = self._noted = 0
        # Plain values under names that no function names: not compared before a step, but behind the trace.
        self.beside: list[Entry] = []
        # Dicts in which looking up makes items, by id: with the keys that they had, and the user's name.
        self._making: dict[int, tuple[defaultdict[Any, Any], frozenset[Any], str]] = {}

    def walk(
        self, value: Any, text: str, name: str | None, written: bool, named: frozenset[str]
    ) -> None:
        """Note what a container or object holds.

        Args:
            value: a container, or an object of which it is not noted what is read.
            text: the user's name of it.
            name: the last name that leads to it, if any.
            written: False where something on the way to it is not read by keys in the code.
            named: all that the user's functions name.
        """
        written = written and self._by_written_keys(value, name, named)
        known = (len(named), len(self._keys))
        seen = self._walked.get(id(value))
        if self._deep >= _DEEP or (
            seen is not None and (seen.known == known and (written or not seen.written))
        ):
            return
        self._walked[id(value)] = _Walked(value, written, known)
        self._named = named
        self._deep += 1
        try:
            self._hold(value, text, written)
        finally:
            self._deep -= 1

    def looked_up(self) -> list[Entry]:
        """Plain items that the step has made by looking them up: until they are there, the same is made again."""
        found = []
        for held, before, text in self._making.values():
            for name in [x for x in held if x not in before and is_plain(held[x])][:_MANY]:
                found.append(_by_default(held, name, f"{text}[{name!r}]"))
        return found

    def _by_written_keys(self, value: Any, name: str | None, named: frozenset[str]) -> bool:
        """True where only items under keys that stand in the code are read of a container or object."""
        own = value if isinstance(value, dict) else _attributes(value)
        texts = [key for key in own if isinstance(key, str)]
        if isinstance(value, dict) and type(value) not in _PLAIN_DICTS:
            return False
        if isinstance(value, dict) and not self._keys.written(name):
            return False
        if isinstance(value, (UserDict, UserList, ChainMap, configparser.RawConfigParser)):
            return False
        if isinstance(value, HOLDERS):
            return named.isdisjoint(_BY_MADE_NAMES) and not named.isdisjoint(texts)
        return not isinstance(value, dict) or not named.isdisjoint(texts)

    def _hold(self, value: Any, text: str, written: bool) -> None:
        if isinstance(value, dict | list | deque | set):
            size = Entry(Size(value), len, len(value), f"the number of items of {text}")
            self._notes.add(size)
        if isinstance(value, dict):
            self._items(value, value, text + "[{!r}]", written)
            self._dict(value, text, written)
        elif isinstance(value, set | frozenset):
            self._set(value, text, written)
        elif isinstance(value, list | deque):
            if len(value) <= _MANY:
                self._items(Items(value), dict(enumerate(value)), text + "[{!r}]", written)
        elif isinstance(value, tuple):
            for number, part in enumerate(value[:_MANY]):
                self._notes.inside(part, f"{text}[{number}]", None, written)
        else:
            own = _attributes(value)
            if own and isinstance(value, HOLDERS):
                self._notes.add(
                    Entry(Size(own), len, len(own), f"the number of attributes of {text}")
                )
            opened = not written and (isinstance(value, HOLDERS) or has_own_reads(type(value)))
            self._items(own, own, text + ".{}", not opened)
            if opened:
                self._order(own, text)

    def _items(self, space: Any, held: Mapping[Any, Any], text: str, written: bool) -> None:
        """Note items: those under texts that nobody names only where keys are made, and there are not too many."""
        all_of_them = not written and len(held) <= _MANY and self._noted < _ALL
        for name, value in list(held.items()):
            where = text.format(name)
            key = isinstance(name, str)
            if key and name not in self._named and not all_of_them:
                if isinstance(value, PLAIN) and not is_changing(value):
                    self.beside.append(Entry(space, name, value, where))
                continue
            self._noted += 1
            self._notes.add(Entry(space, name, value, where))
            self._notes.inside(value, where, name if key else None, written)

    def _dict(self, held: dict[Any, Any], text: str, written: bool) -> None:
        """Note in which order a dict is that may be gone over, and what looking up may make in it."""
        if isinstance(held, defaultdict):
            self._making.setdefault(id(held), (held, frozenset(held), text))
            for name in sorted(self._named - held.keys()):
                self._notes.add(Entry(held, name, MISSING, f"{text}[{name!r}]"))
        if not written:
            self._order(held, text)

    def _order(self, held: dict[Any, Any], text: str) -> None:
        """Note the order of items, which who goes over them sees."""
        if 1 < len(held) <= _MANY and is_plain(tuple(held)):
            self._notes.add(
                Entry(KeyOrder(held), list, list(held), f"the order of items of {text}")
            )

    def _set(self, members: Iterable[Any], text: str, written: bool) -> None:
        kept = frozenset(members)
        if len(kept) > _MANY:
            return
        if isinstance(members, set):
            self._notes.add(Entry(Members(members), set, kept, text))
        for each in kept:
            self._notes.inside(each, f"a member of {text}", None, written)


def _by_default(held: defaultdict[Any, Any], name: Any, text: str) -> Entry:
    """An item that a lookup has made, to be compared with what a lookup gives."""
    made = held[name]
    return Entry(Asked((held, name), lambda: held.get(name, made)), name, made, text)


def _attributes(value: Any) -> dict[str, Any]:
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else {}


@final
@dataclass(frozen=True)
class Loads:
    """The places that code reads, by the last name of each: a variable, an attribute, the text of a key.

    Attributes:
        loaded: all of them.
        opened: those of which a dict that is there may be read under any key.
        renamed: (name, other name) where what is in one place is put in another.
    """

    loaded: frozenset[str]
    opened: frozenset[str]
    renamed: frozenset[tuple[str, str]]


@final
class Keys:
    """The places that the functions of a step read."""

    def __init__(self) -> None:
        self._loaded: set[str] = set()
        self._opened: set[str] = set()

    def add(self, code: types.CodeType) -> None:
        """One more function of the step."""
        found = loads_in(code)
        opened = set(found.opened)
        more = True
        while more:
            before = len(opened)
            opened |= {name for name, other in found.renamed if other in opened}
            more = len(opened) > before
        self._loaded |= found.loaded
        self._opened |= opened

    def written(self, name: str | None) -> bool:
        """True where a dict in a place of this name is read by keys that stand in the code, and in no other way."""
        return name in self._loaded and name not in self._opened

    def __len__(self) -> int:
        return len(self._loaded) + len(self._opened)


@cache
def loads_in(code: types.CodeType) -> Loads:
    """The places that a function reads, and those of the functions inside it."""
    steps = [each for each in dis.get_instructions(code) if each.opname not in _NOISE]
    steps += [_END] * 3
    loaded: set[str] = set()
    opened: set[str] = set()
    renamed: set[tuple[str, str]] = set()
    for place in range(len(steps) - 3):
        names, after = _loaded(steps, place)
        loaded.update(names)
        opened.update(names[:-1])  # another value is loaded behind these
        if names and not _by_written_key(steps, place, after):
            others = _stored(steps[after:])
            renamed.update((names[-1], other) for other in others)
            if not others:
                opened.add(names[-1])
    for inner in (each for each in code.co_consts if isinstance(each, types.CodeType)):
        below = loads_in(inner)
        loaded |= below.loaded
        opened |= below.opened
        renamed |= below.renamed
    return Loads(frozenset(loaded), frozenset(opened), frozenset(renamed))


def _loaded(steps: Sequence[dis.Instruction], place: int) -> tuple[tuple[str, ...], int]:
    """The names of the places that an instruction loads, and the number of the instruction behind it."""
    step = steps[place]
    if step.opname == "LOAD_CONST":
        item = isinstance(step.argval, str) and _subscript(steps[place + 1])
        return ((step.argval,), place + 2) if item else ((), place)
    if step.opname is None or "LOAD_" not in step.opname:
        return (), place
    names = step.argval if isinstance(step.argval, tuple) else (step.argval,)
    return tuple(each for each in names if isinstance(each, str)), place + 1


def _subscript(step: dis.Instruction) -> bool:
    return step.opname in _SUBSCRIPTS or (step.opname == "BINARY_OP" and step.argrepr == "[]")


def _by_written_key(steps: Sequence[dis.Instruction], place: int, after: int) -> bool:
    """True where what is loaded at `place` is asked for an item under a written key, or for no item."""
    first, second = steps[after], steps[after + 1]
    if first.opname in ("LOAD_ATTR", "LOAD_METHOD"):
        one = first.argval in _OF_ONE_KEY and second.opname == "LOAD_CONST"
        return one or not hasattr(dict, first.argval)
    if first.opname == "CONTAINS_OP":
        return place > 0 and steps[place - 1].opname == "LOAD_CONST"
    return first.opname == "POP_TOP" or (first.opname == "LOAD_CONST" and _subscript(second))


def _stored(steps: Sequence[dis.Instruction]) -> list[str]:
    """The names under which a value is kept at once."""
    found = []
    for step in steps:
        if step.opname is None or not step.opname.startswith("STORE_"):
            break
        if step.opname == "STORE_FAST_LOAD_FAST":
            return []
        found += [step.argval] if isinstance(step.argval, str) else []
        if not isinstance(step.argval, str):
            return []
    return found
