"""What a function of the user's sees beside its arguments: closures, globals, and what is bound to it."""

from __future__ import annotations

import types
from collections.abc import Iterator
from functools import partial
from typing import Any


def seen_by(function: Any) -> Iterator[Any]:
    """The values that a function sees."""
    if isinstance(function, partial):
        yield from (*function.args, *function.keywords.values(), *seen_by(function.func))
        return
    yield getattr(function, "__self__", function)
    yield from (cell.cell_contents for cell in cells_of(function))
    yield from (space[name] for space, name in globals_of(function))


def plain_function(function: Any) -> types.FunctionType | None:
    """The function that a call runs, below partials, methods and objects that can be called."""
    while isinstance(function, partial):
        function = function.func
    for one in (function, getattr(function, "__func__", None), type(function).__call__):
        if isinstance(one, types.FunctionType):
            return one
    return None


def globals_of(function: Any) -> list[tuple[dict[str, Any], str]]:
    """The globals that a function names: their dict, and the name."""
    plain = plain_function(function)
    if plain is None:
        return []
    space = plain.__globals__
    return [(space, name) for name in names_in(plain.__code__) if name in space]


def names_in(code: types.CodeType) -> dict[str, None]:
    """The names that a function reads, as globals or attributes, with those of functions inside it."""
    found = dict.fromkeys(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found.update(names_in(constant))
    return found


def cells_of(function: Any) -> list[Any]:
    """The variables of a closure that have a value."""
    plain = plain_function(function)
    return [cell for cell in (plain and plain.__closure__) or () if _has_content(cell)]


def _has_content(cell: Any) -> bool:
    try:
        return cell.cell_contents is not _has_content  # true whenever there is one
    except ValueError:
        return False
