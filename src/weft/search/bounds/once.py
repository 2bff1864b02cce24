"""Values that are made once for a key."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

_K = TypeVar("_K")
_V = TypeVar("_V")


def once(made: dict[_K, _V], key: _K, make: Callable[[], _V]) -> _V:
    """The value of a key, which is made where it is not there yet."""
    if key not in made:
        made[key] = make()
    return made[key]
