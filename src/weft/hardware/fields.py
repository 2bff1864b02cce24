"""Fields of YAML files that describe hardware: read as plain data, each error with its file and its key."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr
from typing import Any

from weft.errors import UserError
from weft.plain_yaml import read_plain_yaml

# GB a second that any link or memory is above; times that follow from less are no numbers.
SLOWEST = 1e-9
# A text of a file may be long, and by its aliases larger than the file.
_SHORT = Repr()


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, as plain data.

    Raises:
        UserError: when there is none, when it is no YAML, or larger than any.
    """
    return read_plain_yaml(path, "a description of hardware", numbers=True)


def mapping(content: Any, where: str, known: Collection[str] | None = None) -> Mapping[str, Any]:
    """A mapping from names; with `known`, only from these."""
    if not isinstance(content, dict) or not all(isinstance(key, str) for key in content):
        raise UserError(f"{where}: expected a mapping from names, found {shown(content)}")
    unknown = sorted(set(content) - set(known)) if known is not None else ()
    if unknown:
        raise UserError(
            f"{where}: no field is named {unknown[0]!r}{meant(unknown[0], known or ())}"
        )
    return content


def number(
    content: Mapping[str, Any],
    key: str,
    where: str,
    default: float | None = None,
    above: float = 0.0,
    most: float = 1e30,
    zero: bool = False,
) -> float:
    """The finite number at a key, above `above` and at most `most`; with `zero`, 0 too."""
    value = content.get(key, default)
    # Truth values are numbers in Python, not in a file.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or not (above < value <= most or (zero and value == 0)):
        limit = f" and at most {most:g}" if most < 1e30 or (is_number and value > most) else ""
        least = "from 0" if zero else f"above {above:g}"
        raise UserError(f"{where}: {key} is a number {least}{limit}; found {shown(value)}")
    return float(value)


def amount(content: Mapping[str, Any], key: str, where: str, default: float | None = None) -> float:
    """The finite number at a key, 0 or above."""
    return number(content, key, where, default, zero=True)


def whole(
    content: Mapping[str, Any],
    key: str,
    where: str,
    default: int | None = None,
    most: int = 1 << 20,
) -> int:
    """The whole number at a key, at least 1 and at most `most`."""
    value = content.get(key, default)
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most:
        raise UserError(f"{where}: {key} is a whole number from 1 to {most}; found {shown(value)}")
    return value


def word(content: Mapping[str, Any], key: str, where: str, of: Collection[str] = ()) -> str:
    """The text at a key, one of `of` where that is given."""
    value = content.get(key)
    if not isinstance(value, str) or not value or (of and value not in of):
        expected = f"one of {', '.join(sorted(of))}" if of else "a text"
        raise UserError(f"{where}: {key} is {expected}; found {shown(value)}")
    return value


def sequence(content: Any, where: str, most: int = 1 << 16) -> list[Any]:
    """A list, of at most `most` entries."""
    if not isinstance(content, list):
        raise UserError(f"{where}: expected a list, found {shown(content)}")
    if len(content) > most:
        raise UserError(f"{where}: expected at most {most} entries, found {len(content)}")
    return content


def meant(name: Any, known: Collection[str]) -> str:
    """The end of an error on an unknown name: the nearest one that there is, or some of them."""
    small = {each.lower(): each for each in known}
    near = get_close_matches(name.lower(), small, n=1) if isinstance(name, str) else []
    if near:
        return f"; did you mean {small[near[0]]!r}?"
    some = sorted(known)
    return f"; there are {', '.join(some[:20])}{', …' if len(some) > 20 else ''}"


def shown(value: Any) -> str:
    """A value of a file, in at most 60 characters."""
    return "nothing" if value is None else _SHORT.repr(value)[:60]
