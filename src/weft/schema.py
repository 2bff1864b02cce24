"""Schema: plain data of files read as typed values, each error with the place, the expected value, and the value got.

The annotations of a dataclass say what its file holds: an entry for each field, of the field's type, and no others.
`Annotated` adds bounds and a unit (`Bounds`), the texts that may be there (`OneOf`), how many entries there may be
(`Length`), or another name in the file (`Key`). Neither msgspec nor cattrs says which key of a mapping is wrong and
what is there, or converts units.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache, lru_cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
    TypeAlias,
    TypeVar,
    Union,
    final,
    get_args,
    get_origin,
    get_type_hints,
    overload,
)

from weft.errors import UserError, is_number, is_whole, wrong

T = TypeVar("T")
# Above it a bound is not worth a word.
_FAR = 1e30


@final
@dataclass(frozen=True, slots=True)
class Bounds:
    """The bounds of a number as the file says it, 0 or more where nothing else is said, and its unit.

    Attributes:
        above: it is greater; `least` does not count then.
        least: it is as great, or greater.
        most: it is as great, or less.
        unit: the value is this number of times as great.
    """

    above: float | None = None
    least: float = 0.0
    most: float = _FAR
    unit: float = 1.0

    def holds(self, value: float) -> bool:
        """True if a number is within the bounds."""
        low = value >= self.least if self.above is None else value > self.above
        return low and value <= self.most

    def text(self, kind: str, got: object) -> str:
        """The kind of number with its bounds, a far one only where it is broken."""
        least = f"from {self.least:g}" if self.above is None else f"above {self.above:g}"
        if self.most >= _FAR and not (is_number(got) and got > self.most):
            return f"{kind} {least}"
        return f"{kind} {least} {'to' if self.above is None else 'and at most'} {self.most:.7g}"


@final
@dataclass(frozen=True, slots=True)
class OneOf:
    """The texts that may be there, or that the keys of a mapping may be."""

    words: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Length:
    """The number of entries of a list or a mapping, or of letters of a text: 1 at least where nothing is said."""

    least: int = 0
    most: int = 1 << 30


@final
@dataclass(frozen=True, slots=True)
class Key:
    """The name of a field in the file."""

    name: str


_Reader: TypeAlias = Callable[[Any, str], Any]


@overload
def read(kind: type[T], content: object, where: str) -> T: ...


@overload
def read(kind: object, content: object, where: str) -> Any: ...


def read(kind: object, content: object, where: str) -> Any:
    """A value of an annotated type from plain data.

    Args:
        kind: a dataclass, a number or text, or tuples, mappings and unions of these, as an annotation says it.
        content: lists, mappings from texts, texts, numbers, truth values and None.
        where: the content stands: the file, and the keys on the way.

    Raises:
        UserError: an entry is missing, unknown, of another type or out of bounds.
    """
    return _reader(kind)(content, where)


def check_known(names: Collection[str], words: Collection[str], where: str, what: str) -> None:
    """Accept names that are all among some.

    Args:
        names: to check.
        words: that there are.
        where: the names stand.
        what: a name names: "field".

    Raises:
        UserError: one is not; says the nearest that is, or some of them.
    """
    unknown = sorted(set(names) - set(words))
    if unknown:
        small = {each.lower(): each for each in words}
        near = get_close_matches(unknown[0].lower(), small, n=1)
        some = ", ".join(sorted(words)[:20]) + (", …" if len(words) > 20 else "")
        rest = f"did you mean {small[near[0]]!r}?" if near else f"there are {some}"
        raise UserError(f"{where}: no {what} is named {unknown[0]!r}; {rest}")


def _wrong(where: str, expected: str, content: Any) -> UserError:
    if content is None:
        return UserError(f"{where} must be {expected}, got nothing")
    return wrong(where, expected, content)


@lru_cache(4096)
def _reader(kind: Any, notes: tuple[Any, ...] = ()) -> _Reader:
    """The function that reads values of a type; `notes` are what annotates it further out."""
    kind, own = _bare(kind)
    notes = (*own, *notes)
    origin = get_origin(kind) or kind
    if origin is Any:
        return lambda content, where: content
    if origin in (Union, UnionType):
        return _union(get_args(kind), notes)
    if origin is Mapping:
        name, value = get_args(kind)
        return _mapping(name, value, _note(notes, Length()))
    if is_dataclass(kind):
        return _dataclass(kind)
    if origin is not Literal and issubclass(origin, tuple):
        return _row(kind) if hasattr(kind, "_fields") else _list(kind, _note(notes, Length()))
    words = get_args(kind) or _note(notes, OneOf(())).words
    if words:
        return _word(words)
    if kind is str:
        return _text(_note(notes, Length(1)).least)
    return _flag if kind is bool else _number(kind, _note(notes, Bounds()))


@lru_cache(4096)
def _bare(kind: Any) -> tuple[Any, tuple[Any, ...]]:
    """A type without its annotations, and these; of a `NewType` the type that it stands for."""
    notes: tuple[Any, ...] = ()
    while get_origin(kind) is Annotated or hasattr(kind, "__supertype__"):
        if hasattr(kind, "__supertype__"):
            kind = kind.__supertype__
        else:
            kind, *more = get_args(kind)
            notes = (*more, *notes)
    return kind, notes


def _note(notes: tuple[Any, ...], default: T) -> T:
    return next((each for each in notes if isinstance(each, type(default))), default)


def _union(options: tuple[Any, ...], notes: tuple[Any, ...]) -> _Reader:
    readers = [(each, _reader(each, notes)) for each in options if each is not type(None)]

    def found(content: Any, where: str) -> Any:
        if content is None and type(None) in options:
            return None
        fitting = [reader for each, reader in readers if _fits(each, content)]
        return (*fitting, readers[0][1])[0](content, where)

    return found


def _fits(kind: Any, content: Any) -> bool:
    """True if content is of the form of an option of a union."""
    kind, _ = _bare(kind)
    origin = get_origin(kind) or kind
    if origin is Literal:
        return content in get_args(kind)
    if origin is Mapping or is_dataclass(kind):
        return isinstance(content, dict)
    return isinstance(content, list if origin is tuple else origin)


def _flag(content: Any, where: str) -> bool:
    if not isinstance(content, bool):
        raise _wrong(where, "true or false", content)
    return content


def _text(least: int) -> _Reader:
    def found(content: Any, where: str) -> str:
        if not isinstance(content, str) or len(content) < least:
            raise _wrong(where, "a text", content)
        return content

    return found


def _word(words: tuple[Any, ...]) -> _Reader:
    expected = f"{'one of ' if len(words) > 1 else ''}{', '.join(map(str, words))}"

    def found(content: Any, where: str) -> Any:
        if not any(type(content) is type(each) and content == each for each in words):
            raise _wrong(where, expected, content)
        return content

    return found


def _number(kind: type, bounds: Bounds) -> _Reader:
    unit, whole = bounds.unit, kind is int and bounds.unit == 1
    is_kind, words = (is_whole, "a whole number") if whole else (is_number, "a number")

    def found(content: Any, where: str) -> float:
        if not is_kind(content) or not bounds.holds(content):
            raise _wrong(where, bounds.text(words, content), content)
        value: float = unit * content
        return value if kind is float else round(value)

    return found


def _mapping(name: Any, value: Any, length: Length) -> _Reader:
    words, reader = _note(_bare(name)[1], OneOf(())).words, _reader(value)

    def found(content: Any, where: str) -> dict[str, Any]:
        _check_names(content, where)
        _check_length(length, content, where)
        if words:
            check_known(content, words, where, "field")
        return {key: reader(each, f"{where}: {key}") for key, each in content.items()}

    return found


def _check_names(content: Any, where: str) -> None:
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise _wrong(where, "a mapping from names", content)


def _check_length(length: Length, content: Collection[Any], where: str) -> None:
    if not length.least <= len(content) <= length.most:
        least = f"{length.least} to " if length.least < length.most else ""
        raise UserError(f"{where} must have {least}{length.most} entries, got {len(content)}")


def _list(kind: Any, length: Length) -> _Reader:
    reader = _reader(get_args(kind)[0])

    def found(content: Any, where: str) -> tuple[Any, ...]:
        if not isinstance(content, list | tuple):
            raise _wrong(where, "a list", content)
        _check_length(length, content, where)
        return tuple([reader(each, f"{where}[{place}]") for place, each in enumerate(content)])

    return found


def _row(kind: Any) -> _Reader:
    """A named tuple, of a list with one entry for each field."""
    readers = [(name, _reader(hint)) for name, hint in _hints(kind).items()]
    expected = f"[{', '.join(name for name, _ in readers)}]"

    def found(content: Any, where: str) -> Any:
        if not isinstance(content, list | tuple) or len(content) != len(readers):
            raise _wrong(where, expected, content)
        pairs = zip(readers, content, strict=True)
        return kind(*[reader(each, f"{where}: {name}") for (name, reader), each in pairs])

    return found


def _dataclass(kind: Any) -> _Reader:
    known = keys_of(kind)
    readers = {key: _reader(_hints(kind)[name]) for key, (name, _) in known.items()}

    def found(content: Any, where: str) -> Any:
        _check_names(content, where)
        check_known(content, known, where, "field")
        made = {}
        for key, (name, optional) in known.items():
            if key in content or not optional:
                made[name] = readers[key](content.get(key), f"{where}: {key}")
        return kind(**made)

    return found


@cache
def keys_of(kind: Any) -> dict[str, tuple[str, bool]]:
    """For each field of a dataclass, by its key in files: the field's name, and whether it may be left out."""
    found = {}
    for each in fields(kind):
        key = _note(_bare(_hints(kind)[each.name])[1], Key(each.name)).name
        optional = each.default is not MISSING or each.default_factory is not MISSING
        found[key] = each.name, optional
    return found


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
