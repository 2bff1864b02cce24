"""Schema: plain data of files read as typed values, each error with the place, what must stand there, and what does.

The annotations of a dataclass say what its file holds: an entry for each field, of the field's type, and no others.
`Annotated` adds bounds and a unit (`Number`), the texts that may stand there (`Words`), how many entries there may be
(`Entries`), or another name in the file (`Key`). Neither msgspec nor cattrs says which key of a mapping is wrong and
what stands there, or converts units.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass
from difflib import get_close_matches
from functools import cache
from types import UnionType
from typing import (
    Annotated,
    Any,
    Literal,
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
class Number:
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
        """True where a number is within the bounds."""
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
class Words:
    """The texts that may stand there, or that the keys of a mapping may be."""

    words: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class Entries:
    """How many entries a list or a mapping has; of a text, how many letters, 1 where nothing is said."""

    least: int = 0
    most: int = 1 << 16


@final
@dataclass(frozen=True, slots=True)
class Key:
    """The name of a field in the file."""

    name: str


@final
class _Nothing:
    """Stands where an entry is missing."""

    def __repr__(self) -> str:
        return "nothing"


_NOTHING = _Nothing()


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
    return _read(kind, (), _NOTHING if content is None else content, where)


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


def _read(kind: Any, notes: tuple[Any, ...], content: Any, where: str) -> Any:
    kind, own = _bare(kind)
    notes = (*own, *notes)
    origin = get_origin(kind) or kind
    if origin is Any:
        return None if content is _NOTHING else content
    if origin in (Union, UnionType):
        if content is _NOTHING and type(None) in get_args(kind):
            return None
        options = [each for each in get_args(kind) if each is not type(None)]
        fitting = [each for each in options if _fits(each, content)]
        return _read((*fitting, *options)[0], notes, content, where)
    if origin is Mapping:
        return _mapping(get_args(kind), notes, content, where)
    if is_dataclass(kind):
        return _fields(kind, content, where)
    if origin is not Literal and issubclass(origin, tuple):
        return _sequence(kind, notes, content, where)
    return _scalar(kind, notes, content, where)


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


def _fits(kind: Any, content: Any) -> bool:
    """True where content is of the form of an option of a union."""
    kind, _ = _bare(kind)
    origin = get_origin(kind) or kind
    if origin is Literal:
        return content in get_args(kind)
    if origin is Mapping or is_dataclass(kind):
        return isinstance(content, dict)
    return isinstance(content, list if origin is tuple else origin)


def _scalar(kind: Any, notes: tuple[Any, ...], content: Any, where: str) -> Any:
    number = _note(notes, Number())
    words = get_args(kind) or _note(notes, Words(())).words
    if words:
        holds = any(type(content) is type(each) and content == each for each in words)
        expected = f"one of {', '.join(map(str, words))}" if len(words) > 1 else str(words[0])
    elif kind is bool:
        holds, expected = isinstance(content, bool), "true or false"
    elif kind is str:
        least = _note(notes, Entries(1)).least
        holds, expected = isinstance(content, str) and len(content) >= least, "a text"
    elif kind is int and number.unit == 1:
        holds = is_whole(content) and number.holds(content)
        expected = number.text("a whole number", content)
    else:
        holds = is_number(content) and number.holds(content)
        expected = number.text("a number", content)
    if not holds:
        raise wrong(where, expected, content)
    if kind is float:
        return number.unit * content
    return round(number.unit * content) if kind is int else content


def _note(notes: tuple[Any, ...], default: T) -> T:
    return next((each for each in notes if isinstance(each, type(default))), default)


def _mapping(kinds: tuple[Any, Any], notes: tuple[Any, ...], content: Any, where: str) -> Any:
    names = _names(content, where)
    _check_count(_note(notes, Entries()), names, where)
    words = next((each.words for each in get_args(kinds[0])[1:] if isinstance(each, Words)), None)
    if words is not None:
        check_known(names, words, where, "field")
    return {name: read(kinds[1], each, f"{where}: {name}") for name, each in names.items()}


def _names(content: Any, where: str) -> dict[str, Any]:
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise wrong(where, "a mapping from names", content)
    return content


def _check_count(entries: Entries, content: Collection[Any], where: str) -> None:
    if not entries.least <= len(content) <= entries.most:
        least = f"{entries.least} to " if entries.least < entries.most else ""
        raise UserError(f"{where} must have {least}{entries.most} entries, got {len(content)}")


def _sequence(kind: Any, notes: tuple[Any, ...], content: Any, where: str) -> Any:
    if not isinstance(content, list | tuple):
        raise wrong(where, "a list", content)
    if hasattr(kind, "_fields"):
        hints = _hints(kind)
        if len(content) != len(hints):
            raise wrong(where, f"[{', '.join(hints)}]", content)
        pairs = zip(hints.items(), content, strict=True)
        return kind(*(read(hint, each, f"{where}: {name}") for (name, hint), each in pairs))
    _check_count(_note(notes, Entries()), content, where)
    inner = get_args(kind)[0]
    return tuple(read(inner, each, f"{where}[{place}]") for place, each in enumerate(content))


def _fields(kind: Any, content: Any, where: str) -> Any:
    names = _names(content, where)
    known = keys_of(kind)
    check_known(names, known, where, "field")
    found = {}
    for key, (name, hint, optional) in known.items():
        if key in names or not optional:
            found[name] = read(hint, names.get(key), f"{where}: {key}")
    return kind(**found)


@cache
def keys_of(kind: Any) -> dict[str, tuple[str, Any, bool]]:
    """Of each field of a dataclass by its key in files: name, type, and whether it may be left out."""
    found = {}
    for each in fields(kind):
        hint = _hints(kind)[each.name]
        key = _note(getattr(hint, "__metadata__", ()), Key(each.name)).name
        optional = each.default is not MISSING or each.default_factory is not MISSING
        found[key] = each.name, hint, optional
    return found


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind, include_extras=True)
