"""Numbers that say when they are read: what stands in place of counters when a step is traced once more."""

from __future__ import annotations

import numbers
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn, final

from weft.capture.watch import Entry

_ARITHMETIC = ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
# What objects need to be handed on; texts are for messages.
_KEPT = {"__new__", "__init__", "__init_subclass__", "__subclasshook__", "__class__", "__doc__"}
_KEPT |= {"__getattribute__", "__setattr__", "__delattr__", "__str__", "__repr__", "__format__"}
_KEPT |= {"__dir__", "__sizeof__", "__reduce__", "__reduce_ex__", "__getnewargs__", "__getstate__"}


@final
class Spy:
    """A number that may be kept and counted on with; whatever else is done with it raises, and is noted."""

    __slots__ = ("_reads", "_value")

    def __init__(self, value: float, reads: list[str]) -> None:
        self._value = value
        self._reads = reads

    def __repr__(self) -> str:
        return repr(self._value)

    def __format__(self, how: str) -> str:
        return format(self._value, how)


def _count(spy: Spy, other: object, *_: object) -> Spy:
    if isinstance(other, numbers.Number | Spy):
        return spy
    return _read(spy)


def _read(spy: Spy, *_: object, **__: object) -> NoReturn:
    spy._reads.append(repr(spy))
    raise TypeError("a number that the step changes is read")


for _name in {*dir(int), *dir(float)} - _KEPT:
    setattr(Spy, _name, property(_read) if _name[0] != "_" else _read)
for _name in _ARITHMETIC:
    for _side in ("", "r", "i"):
        setattr(Spy, f"__{_side}{_name}__", _count)


def is_spy(value: Any) -> bool:
    """True where a value is a number that says when it is read."""
    return type(value) is Spy


@contextmanager
def spied(entries: Sequence[Entry]) -> Iterator[list[str]]:
    """While this lasts, numbers that have changed are spies; gives a list of which there is one for each read."""
    reads: list[str] = []
    places = []
    for entry in entries:
        now = entry.value_now
        if _is_number(now) and _is_number(entry.value) and entry.replaceable:
            entry.put(Spy(now, reads))
            places.append((entry, now))
    try:
        yield reads
    finally:
        for entry, now in places:
            if entry.replaceable:  # a deque may have become shorter
                entry.put(now)


def _is_number(value: Any) -> bool:
    return type(value) in (int, float)
