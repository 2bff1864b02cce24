"""Fields of YAML files that describe hardware: read as plain data, each error with its file and its key."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping
from difflib import get_close_matches
from pathlib import Path
from reprlib import Repr
from typing import Any, final

import yaml

from weft.errors import UserError

# Far above any description of hardware; what is larger is some other file.
LARGEST = 1 << 20
# GB a second that any link or memory is above; times that follow from less are no numbers.
SLOWEST = 1e-9
# A text of a file may be long, and by its aliases larger than the file.
_SHORT = Repr()


@final
class _Loader(yaml.SafeLoader):
    """Plain data only; a key that stands twice in a mapping is an error, where yaml would keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        found = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
        for key, times in Counter(found).items():
            if times > 1:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"the key {key!r} stands twice"
                )
        return super().construct_mapping(node, deep)


# YAML 1.1 takes 1e-3 for a text, and 1.0e-3 for a number.
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+e[-+]?\d+", re.IGNORECASE), list("-+0123456789")
)


def read_yaml(path: Path) -> Any:
    """The content of a YAML file, as plain data.

    Raises:
        UserError: when there is none, when it has more than 1 MiB, or is no YAML.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if len(text) > LARGEST:
        raise UserError(f"{path} has more than {LARGEST} bytes; expected a description of hardware")
    try:
        return yaml.load(text, _Loader)
    except RecursionError:
        raise UserError(
            f"{path} is no YAML that can be read: it is nested too deeply; expected a description of hardware"
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no YAML: {error}") from error
    except ValueError:  # Python reads no whole number of some thousand digits
        raise UserError(
            f"{path} is no YAML: a date or number of it is none; expected a description of hardware"
        ) from None


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
