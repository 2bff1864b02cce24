"""Values of Python that a step was captured with, to be compared before every step.

A value is named by its place: an item of a dict, list or deque; an attribute (a closure's variable is an
attribute of its cell); or the result of a call, such as the length of a container.
"""

from __future__ import annotations

import array
import enum
import math
import types
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import contains, is_, itemgetter
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
# Where values are kept: a dict, list or deque, an `AttributeRead` or `QueriedValue`.
Space: TypeAlias = Any
Array: TypeAlias = "np.ndarray[Any, Any] | array.array[Any]"
_attribute: Callable[[Any, str], Any] = object.__getattribute__


@final
@dataclass(frozen=True, slots=True)
class AttributeRead:
    """The attributes of an object, past what its class does to give them; a cell's content is one."""

    owner: Any

    def get(self, name: str, default: Any) -> Any:
        try:
            return _attribute(self.owner, name)
        except (AttributeError, ValueError):  # a variable that is not bound
            return default


@final
@dataclass(frozen=True, slots=True)
class QueriedValue:
    """The result of a call without arguments.

    Attributes:
        owner: identifies it, and is kept alive; None if each result is a new object.
        ask: the call.
        equal: True if an equal result is the same; else the object has to be.
    """

    owner: Any
    ask: Callable[[], Any]
    equal: bool = True

    def get(self, _name: Any, default: Any) -> Any:
        try:
            return self.ask()
        except (TypeError, ArithmeticError, ValueError, LookupError):
            return default


@final
@dataclass(frozen=True, slots=True)
class Guard:
    """A value that was read from `space` under a name; `text` is the user's name of it.

    `made`: there was no value, and the step itself makes one.
    """

    space: Space
    name: Any
    value: Any
    text: str
    made: bool = False

    @property
    def key(self) -> tuple[int, Any]:
        """The identity of the value that is watched."""
        owner = (
            self.space.owner if isinstance(self.space, AttributeRead | QueriedValue) else self.space
        )
        return id(self.space if owner is None else owner), self.name

    @property
    def kind(self) -> str:
        """The loop of a `PythonGuards` that reads the value again."""
        missing = self.value is MISSING
        if isinstance(self.space, QueriedValue):
            compared = self.space.equal and not missing
            return "other" if not compared else "size" if self.name is len else "result"
        if isinstance(self.space, AttributeRead):
            return "other" if missing else "attribute"
        return "absent" if missing else "item"

    @property
    def replaceable(self) -> bool:
        """True if `put` can put another object in its place."""
        if isinstance(self.space, list | deque):
            return bool(self.name < len(self.space))
        cell = isinstance(self.space, AttributeRead) and isinstance(
            self.space.owner, types.CellType
        )
        return cell or isinstance(self.space, dict)

    def put(self, value: Any) -> None:
        """Put another object in its place, past whatever sets the user's attributes."""
        if isinstance(self.space, AttributeRead):
            self.space.owner.cell_contents = value
        else:
            self.space[self.name] = value

    def holds(self) -> bool:
        """True while the value is the one of the capture."""
        value = self.value_now
        if value is self.value or _same(value, self.value):
            return True
        if isinstance(self.space, QueriedValue) and self.space.equal:
            return bool(value == self.value)
        # A value that an eager call of a live model made is made again by the step.
        return self.made and hasattr(type(value), "sbp")

    @property
    def value_now(self) -> Any:
        """The present value; `MISSING` when it is gone."""
        if isinstance(self.space, list | deque):
            return self.space[self.name] if self.name < len(self.space) else MISSING
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


def size_guard(held: Any, text: str) -> Guard:
    """The number of items that a container has."""
    return Guard(QueriedValue(held, held.__len__), len, len(held), f"the number of {text}")


def question_guard(owner: Any, ask: Callable[[], Any], text: str, equal: bool = True) -> Guard:
    """The result of a call, which is the only one for its owner."""
    return Guard(QueriedValue(owner, ask, equal), None, ask(), text)


@final
class PythonGuards:
    """The values that a captured step depends on, each once."""

    def __init__(self, entries: Sequence[Guard] = ()) -> None:
        self.entries = tuple(entries)
        kinds: defaultdict[str, list[Guard]] = defaultdict(list)
        items: defaultdict[int, list[Guard]] = defaultdict(list)
        for each in entries:
            kinds[each.kind].append(each)
        for each in kinds["item"]:
            items[id(each.space)].append(each)
        groups, attributes = list(items.values()), kinds["attribute"]
        # All items of a container are read at once; a lone one twice, as a lone name gives no tuple.
        self._readers = [
            (itemgetter(*(e.name for e in each), each[0].name), each[0].space) for each in groups
        ]
        self._owners = [each.space.owner for each in attributes]
        self._names = [each.name for each in attributes]
        # The objects at capture, in the order in which they are read.
        self._then = [e.value for each in groups for e in (*each, each[0])]
        self._then += [each.value for each in attributes]
        self._sized = [each.space.owner for each in kinds["size"]]
        self._asked = [each.space.ask for each in kinds["result"]]
        self._results = [each.value for each in (*kinds["size"], *kinds["result"])]
        self._spaces = [each.space for each in kinds["absent"]]
        self._absent = [each.name for each in kinds["absent"]]
        self._others = kinds["other"]

    def settled(self, constants: Iterable[torch.Tensor] = ()) -> PythonGuards:
        """Without the values that the step itself has changed: they say nothing about the next step.

        Args:
            constants: read live; arrays of which they are the memory need not be compared.
        """
        live = {each.data_ptr() for each in constants}
        return PythonGuards([e for e in self.entries if _address(e) not in live and e.holds()])

    def changed(self) -> Guard | None:
        """The first value that is another one now."""
        try:
            if self._same():
                return None
        except (KeyError, IndexError, ValueError, AttributeError, TypeError, ArithmeticError):
            pass  # something is gone, or cannot be computed any more
        return next((entry for entry in self.entries if not entry.holds()), None)

    def _same(self) -> bool:
        """True if everything is the same object or an equal result, and nothing has come."""
        now = chain(
            chain.from_iterable([read(space) for read, space in self._readers]),
            map(_attribute, self._owners, self._names),
        )
        return (
            all(map(is_, now, self._then))
            and [*map(len, self._sized), *[ask() for ask in self._asked]] == self._results
            and not any(map(contains, self._spaces, self._absent))
            and all(each.holds() for each in self._others)
        )


@final
class BitwiseEqual:
    """A number compared bit by bit: 0.0 differs from -0.0, nan equals nan."""

    def __init__(self, number: Any) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BitwiseEqual) and repr(self.number) == repr(other.number)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(self.number)


def _address(entry: Guard) -> int | None:
    """The memory of an array whose values are watched; None for other entries."""
    values = entry.space.owner if isinstance(entry.space, QueriedValue) else None
    if isinstance(values, array.array):
        return values.buffer_info()[0]
    return values.ctypes.data if isinstance(values, np.ndarray) else None


def is_plain(value: Any, depth: int = 5) -> bool:
    """True if a value can be compared by itself."""
    if isinstance(value, dict):
        value = (*value, *value.values())
    if isinstance(value, tuple | list | set | frozenset):
        return depth > 0 and all(is_plain(part, depth - 1) for part in value)
    return issubclass(type(value), PLAIN)  # a `UnbackedNumber` says that it is an instance


def _same(one: Any, other: Any, depth: int = 5) -> bool:
    """True if values are equal; a number is not a flag, nan is nan, and of objects only themselves are the same."""
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
    if is_plain(value) or isinstance(value, (*FUNCTIONS, BitwiseEqual)):
        return repr(value)[:80]
    if isinstance(value, frozenset):
        return f"a set of {len(value)}"
    return f"a {type(value).__name__} (number {id(value):x})"
