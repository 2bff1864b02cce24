"""Values of Python that a step was captured with, to be compared before every step."""

from __future__ import annotations

import array
import enum
import math
import types
from collections import deque
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, contains, getitem, is_, itemgetter
from typing import Any, TypeAlias, final

import numpy as np
import torch

# Values that are compared themselves; of others, only whether they are the same object.
PLAIN = (
    *(bool, int, float, complex, str, bytes, type(None)),
    *(enum.Enum, np.generic, torch.dtype, torch.device),
)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
MISSING = object()
Space: TypeAlias = Any  # with `get(name, default)`
_content = attrgetter("cell_contents")


@final
@dataclass(frozen=True, slots=True)
class Entry:
    """A value that was read: `space.get(name)` gives what it is now; `text` is how the user calls it.

    `made` says that there was none, and that the step itself makes one.
    """

    space: Space
    name: Any
    value: Any
    text: str
    made: bool = False

    @property
    def key(self) -> tuple[int, Any]:
        """The identity of the value that is watched."""
        # A dict of the user's may have an attribute of that name.
        known = isinstance(self.space, (Cell, Items, *_APART))
        return (self.space.key if known else id(self.space)), self.name

    @property
    def replaceable(self) -> bool:
        """True where `put` can put another object in its place."""
        if isinstance(self.space, Items):
            mutable = isinstance(self.space.items, list | deque)
            return mutable and bool(self.name < len(self.space.items))
        return isinstance(self.space, dict | Cell)

    def put(self, value: Any) -> None:
        """Put another object in its place, past whatever sets the user's attributes."""
        if isinstance(self.space, Cell):
            self.space.cell.cell_contents = value
        elif isinstance(self.space, Items):
            self.space.items[self.name] = value
        else:
            self.space[self.name] = value

    def holds(self) -> bool:
        """True while the value is the one of the capture."""
        value = self.value_now
        if value is self.value or _same(value, self.value):
            return True
        if isinstance(self.space, Outcome):
            return bool(value == self.value)
        if isinstance(self.space, Members) and not is_plain(value):
            return bool(value == self.value)  # by identity, as tensors and objects are in a set
        # What an eager call of a live model has made is what the step makes for itself.
        return self.made and hasattr(type(value), "sbp")

    @property
    def value_now(self) -> Any:
        """The present value; `MISSING` when it is gone."""
        return self.space.get(self.name, MISSING)

    @property
    def now(self) -> str:
        """The present value, in words."""
        value = self.value_now
        return "gone" if value is MISSING else _shown(value)

    @property
    def then(self) -> str:
        """The value at capture, in words."""
        return "not there" if self.value is MISSING else _shown(self.value)


@final
class Watch:
    """The values that a captured step depends on, each once."""

    def __init__(self, entries: tuple[Entry, ...] = ()) -> None:
        self.entries = entries
        self._objects = _Objects(entries)
        self._gaps = _Gaps(entries)
        self._contents = _Contents(entries)

    def settled(self, constants: Iterable[torch.Tensor] = ()) -> Watch:
        """Without what is another value already: what the step has left behind says nothing of the next one.

        Args:
            constants: read live; arrays of which they are the memory need not be compared.
        """
        live = {each.data_ptr() for each in constants}
        kept = (
            e for e in self.entries if not isinstance(e.space, Content) or e.space.at not in live
        )
        return Watch(tuple(entry for entry in kept if entry.holds()))

    def changed(self) -> Entry | None:
        """The first value that is another one now."""
        try:
            if self._same():
                return None
        except (KeyError, IndexError, ValueError, AttributeError, TypeError, ArithmeticError):
            pass  # something is gone, or cannot be computed any more
        return next((entry for entry in self.entries if not entry.holds()), None)

    def _same(self) -> bool:
        """True where everything is the same object, and nothing has come."""
        return self._objects.same() and self._gaps.same() and self._contents.same()


@final
class Cell:
    """A variable of a closure, with the `get` of a dict."""

    def __init__(self, cell: Any) -> None:
        self.key = id(cell)
        self.cell = cell

    def get(self, _name: str, default: Any) -> Any:
        try:
            return self.cell.cell_contents
        except ValueError:
            return default


@final
class Items:
    """A list, with the `get` of a dict."""

    def __init__(self, items: list[Any] | deque[Any]) -> None:
        self.key = id(items)
        self.items = items

    def get(self, number: int, default: Any) -> Any:
        return self.items[number] if number < len(self.items) else default


@final
class Size:
    """The number of items that a container has, with the `get` of a dict; `name` is `len`."""

    def __init__(self, items: Collection[Any]) -> None:
        self.key = id(items)
        self.items = items

    def get(self, _name: Any, _default: Any) -> int:
        return len(self.items)


@final
class Members:
    """The members of a set, with the `get` of a dict; `name` is `set`."""

    def __init__(self, items: set[Any]) -> None:
        self.key = id(items)
        self.items = items

    def get(self, _name: Any, _default: Any) -> frozenset[Any]:
        return frozenset(self.items)


@final
class KeyOrder:
    """The keys of a dict, in order, with the `get` of a dict; `name` is `list`."""

    def __init__(self, items: dict[Any, Any]) -> None:
        self.key = id(items)
        self.items = items

    def get(self, _name: Any, _default: Any) -> list[Any]:
        return list(self.items)


@final
class Attribute:
    """An attribute that is in no dict (`__slots__`), with the `get` of one."""

    def __init__(self, owner: Any) -> None:
        self.key = id(owner)
        self.owner = owner

    def get(self, name: str, default: Any) -> Any:
        try:
            return object.__getattribute__(self.owner, name)
        except AttributeError:
            return default


@final
class Asked:
    """The result of a function without arguments, such as `torch.get_default_dtype`, with the `get` of a dict.

    Args:
        key: tells it from others; kept alive.
        ask: the function.
    """

    def __init__(self, key: object, ask: Callable[[], Any]) -> None:
        self.key = id(key)
        self.of, self.ask = key, ask

    def get(self, _name: Any, _default: Any) -> Any:
        return self.ask()


Array: TypeAlias = "np.ndarray[Any, Any] | array.array[Any]"


@final
class Content:
    """The values of an array of numpy or Python, as bytes, with the `get` of a dict; `name` is `content`."""

    def __init__(self, values: Array) -> None:
        self.key = id(values)
        self.array = values
        if isinstance(values, array.array):
            self.at = values.buffer_info()[0]
        else:
            self.at = values.ctypes.data

    def get(self, _name: str, _default: Any) -> bytes:
        return self.array.tobytes()


@final
class Exactly:
    """A number that is equal to none but itself: 0.0 is not -0.0, nan is nan."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Exactly) and repr(self.number) == repr(other.number)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.number)


@final
class Outcome:
    """The result of counting with numbers, such as a comparison, with the `get` of a dict."""

    def __init__(self, compute: Callable[[], Any]) -> None:
        self.key = id(self)
        self.compute = compute

    def get(self, _name: str, default: Any) -> Any:
        try:
            return self.compute()
        except (TypeError, ArithmeticError, ValueError, LookupError):
            return default


_APART = (Size, Members, KeyOrder, Attribute, Content, Outcome, Asked)
_Group: TypeAlias = tuple[Any, list[Any], list[Any]]


@final
class _Objects:
    """Values that are to be the same objects: all of them are read in a few loops, and compared in one."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        quick, single, cells = _parted(entries)
        slots = [each for each in _of_kind(entries, Attribute) if each.value is not MISSING]
        asked = _of_kind(entries, Asked)
        # How all values of a space are read at once.
        self._readers = [(itemgetter(*names), space) for space, names, _ in quick]
        self._spaces, self._names = _columns((_readable(e.space), e.name) for e in single)
        self._cells = [entry.space.cell for entry in cells]
        self._owners, self._slots = _columns((e.space.owner, e.name) for e in slots)
        self._asked = [entry.space.ask for entry in asked]
        # What all of them were, in this order.
        self._then = list(chain.from_iterable(values for _, _, values in quick))
        self._then += [entry.value for entry in (*single, *cells, *slots, *asked)]

    def same(self) -> bool:
        """True where they are; raises where one is gone."""
        now = chain(
            chain.from_iterable([read(space) for read, space in self._readers]),
            map(getitem, self._spaces, self._names),
            map(_content, self._cells),
            map(getattr, self._owners, self._slots),
            [ask() for ask in self._asked],
        )
        return all(map(is_, now, self._then))


@final
class _Gaps:
    """Places where nothing was, and nothing is to be: names in spaces, attributes in `__slots__`, containers."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        missing = [entry for entry in entries if entry.value is MISSING]
        self._vacant = _of_kind(missing, Attribute)
        absent = (entry for entry in missing if not isinstance(entry.space, Attribute))
        self._spaces, self._names = _columns((e.space, e.name) for e in absent)
        self._empty = [e.space.items for e in _of_kind(entries, Size) if not e.value]

    def same(self) -> bool:
        """True where they are empty still."""
        return not (
            any(map(contains, self._spaces, self._names))
            or (self._vacant and not all(entry.holds() for entry in self._vacant))
            or any(self._empty)
        )


@final
class _Contents:
    """Containers, arrays and results that are to be equal to what they were."""

    def __init__(self, entries: tuple[Entry, ...]) -> None:
        sizes = [entry for entry in _of_kind(entries, Size) if entry.value]
        self._sized, self._sizes = _columns((e.space.items, e.value) for e in sizes)
        sets = _of_kind(entries, Members)
        self._sets, self._members = _columns((e.space.items, e.value) for e in sets)
        ordered = _of_kind(entries, KeyOrder)
        self._ordered, self._orders = _columns((e.space.items, e.value) for e in ordered)
        arrays = _of_kind(entries, Content)
        self._arrays, self._bytes = _columns((e.space.array, e.value) for e in arrays)
        computed = _of_kind(entries, Outcome)
        self._computed, self._outcomes = _columns((e.space.compute, e.value) for e in computed)

    def same(self) -> bool:
        """True where they are; raises where a result cannot be computed any more."""
        return (
            list(map(len, self._sized)) == self._sizes
            and self._sets == self._members
            and list(map(list, self._ordered)) == self._orders
            and [each.tobytes() for each in self._arrays] == self._bytes
            and [compute() for compute in self._computed] == self._outcomes
        )


def _of_kind(entries: Iterable[Entry], space: type) -> list[Entry]:
    return [entry for entry in entries if isinstance(entry.space, space)]


def _parted(entries: Iterable[Entry]) -> tuple[list[_Group], list[Entry], list[Entry]]:
    """Values that are read together: space, names and values; such as are alone in a space; those of closures."""
    groups: dict[int, list[Entry]] = {}
    cells = []
    for entry in entries:
        if isinstance(entry.space, Cell):
            cells.append(entry)
        elif entry.value is not MISSING and not isinstance(entry.space, _APART):
            groups.setdefault(entry.key[0], []).append(entry)
    several = [each for each in groups.values() if len(each) > 1]
    quick = [
        (_readable(each[0].space), [e.name for e in each], [e.value for e in each])
        for each in several
    ]
    return quick, [each[0] for each in groups.values() if len(each) == 1], cells


def _readable(space: Space) -> Any:
    return space.items if isinstance(space, Items) else space


def _columns(pairs: Iterable[tuple[Any, Any]]) -> tuple[list[Any], list[Any]]:
    rows = list(pairs)
    return [first for first, _ in rows], [second for _, second in rows]


def is_plain(value: Any, depth: int = 5) -> bool:
    """True where a value can be compared by itself."""
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, tuple | list | set | frozenset):
        return depth > 0 and all(is_plain(part, depth - 1) for part in value)
    return issubclass(type(value), PLAIN)  # a `LaterNumber` says that it is an instance


def _same(one: Any, other: Any, depth: int = 5) -> bool:
    """True where values are equal; a number is no flag, nan is nan, and of objects only themselves are the same."""
    if type(one) is not type(other):
        return False
    if is_plain(one) and is_plain(other):
        # The text tells 1 from True inside of containers, too.
        if isinstance(one, float) and one == 0 == other:
            return math.copysign(1, one) == math.copysign(1, other)
        plain = isinstance(one, (*PLAIN, set, frozenset))
        return (plain and bool(one == other)) or repr(one) == repr(other)
    if isinstance(one, types.MethodType):  # each time another one
        return bool(one == other)
    if type(one) not in (tuple, list, dict, deque) or len(one) != len(other) or not depth:
        return False
    if isinstance(one, dict):
        one, other = [*one, *one.values()], [*other, *other.values()]
    return all(x is y or _same(x, y, depth - 1) for x, y in zip(one, other, strict=True))


def _shown(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a tensor {list(value.shape)} (number {id(value):x})"
    if is_plain(value) or isinstance(value, (*FUNCTIONS, Exactly)):
        return repr(value)[:80]
    if isinstance(value, frozenset):
        return f"a set of {len(value)}"
    return f"a {type(value).__name__} (number {id(value):x})"
