"""YAML as plain data and within bounds, so that files of others can be read: nothing is made of them but
numbers, texts, lists and mappings, and no small file becomes a large one.
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any, final

import yaml

from weft.errors import UNREADABLE, UserError

# Bytes of a file, levels of lists and mappings in each other, and entries with all that aliases repeat: far
# above any file that is written by hand, or by weft.
LARGEST = 1 << 20
DEEPEST = 50
MOST = 50_000


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


def _without(*tags: str) -> dict[str, list[Any]]:
    """Kinds that yaml takes plain scalars for, by their first letter, but for some."""
    known = yaml.SafeLoader.yaml_implicit_resolvers
    return {key: [each for each in every if each[0] not in tags] for key, every in known.items()}


# YAML 1.1 takes 1:30 for 90, and 010 for 8: here they are texts, which whoever wants a number refuses.
_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = _without(_INT, _FLOAT)
_Loader.add_implicit_resolver(
    _INT,
    re.compile(r"[-+]?(0b[01_]+|0x[0-9a-fA-F_]+|0|[1-9][0-9_]*)$"),
    list("-+0123456789"),
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"([-+]?[0-9][0-9_]*\.[0-9_]*([eE][-+][0-9]+)?|\.[0-9][0-9_]*([eE][-+][0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


@final
class _LoaderOfNumbers(_Loader):
    """Takes 1e-3 for a number, which YAML 1.1 takes for a text, other than 1.0e-3."""


_LoaderOfNumbers.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?\d+e[-+]?\d+", re.IGNORECASE), list("-+0123456789")
)


def read_plain_yaml(path: Path, expected: str, *, numbers: bool = False) -> Any:
    """The content of a YAML file.

    Args:
        path: of the file.
        expected: what it should be, for errors.
        numbers: as of `load_yaml`.

    Raises:
        UserError: there is none, it is no YAML, or beyond the bounds.
    """
    try:
        with path.open("rb") as file:
            text = file.read(LARGEST + 1)
    except (OSError, ValueError) as error:  # ValueError: a zero byte in the path
        why = getattr(error, "strerror", None) or error
        raise UserError(f"{path} cannot be read: {why}; expected {expected}") from error
    return load_yaml(text, str(path), expected, numbers=numbers)


def load_yaml(text: str | bytes, where: str, expected: str, *, numbers: bool = False) -> Any:
    """The content of a YAML text.

    Args:
        text: in UTF-8 where it is bytes.
        where: names it, for errors.
        expected: what it should be, for errors.
        numbers: whether 1e-3 is a number; YAML's own writers write such a text without quotes.

    Raises:
        UserError: it is no YAML, or beyond the bounds.
    """
    if len(text) > LARGEST:
        raise UserError(f"{where} has more than {LARGEST} bytes; expected {expected}")
    try:
        text = text.decode() if isinstance(text, bytes) else text
        _check_bounds(text)
        return yaml.load(text, _LoaderOfNumbers if numbers else _Loader)
    except (yaml.YAMLError, UnicodeDecodeError, _BeyondBoundsError) as error:
        raise UserError(f"{where} cannot be read as YAML: {error}; expected {expected}") from error
    except UNREADABLE:  # a day that is none, thousands of digits; a list as a key
        raise UserError(
            f"{where} cannot be read as YAML: a date, a number or a key is invalid; expected {expected}"
        ) from None


@final
class _BeyondBoundsError(Exception):
    """The text holds more, or deeper, than a file may."""


def _check_bounds(text: str) -> None:
    """Count entries and levels before anything is made of them; an alias counts as what it repeats."""
    anchored: dict[str, int] = {}
    # For each list and mapping that is open: its anchor, and the entries before it.
    opened: list[tuple[str | None, int]] = []
    count = 0
    for event in yaml.parse(text, _Loader):
        if isinstance(event, yaml.AliasEvent):
            if any(anchor == event.anchor for anchor, _ in opened):
                raise _BeyondBoundsError(f"*{event.anchor} contains itself")
            count += anchored.get(str(event.anchor), 1)
        elif isinstance(event, yaml.ScalarEvent):
            count += 1
            anchored.update({event.anchor: 1} if event.anchor else {})
        elif isinstance(event, yaml.CollectionStartEvent):
            opened.append((event.anchor, count))
            count += 1
        elif isinstance(event, yaml.CollectionEndEvent):
            anchor, before = opened.pop()
            anchored.update({anchor: count - before} if anchor else {})
        if count > MOST:
            raise _BeyondBoundsError(f"it has more than {MOST} entries")
        if len(opened) > DEEPEST:
            raise _BeyondBoundsError(f"it is nested more than {DEEPEST} levels deep")
