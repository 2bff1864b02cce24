"""Functions that run otherwise while a step is captured, in the thread that captures it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any
from unittest.mock import patch


@contextmanager
def replaced(
    *functions: tuple[Any, str, Callable[[Callable[..., Any]], Any]],
) -> Iterator[set[int]]:
    """While this lasts, calls in this thread go to others; other threads call the functions themselves.

    Args:
        functions: owner and name of each, and what makes the other of it.

    Yields:
        The other threads that have called one.
    """
    own, others = get_ident(), set[int]()
    # None once this is over: torch's tables may hold methods longer.
    made: list[Callable[..., Any]] = []

    def standing(place: int, name: str, plain: Callable[..., Any]) -> Any:
        def call(*args: Any, **named: Any) -> Any:
            if made and get_ident() == own:
                return made[place](*args, **named)
            if made:
                others.add(get_ident())
            return plain(*args, **named)

        call.__name__ = name  # torch looks methods up by name, and hands this one to modes
        return call

    with ExitStack() as stack:
        for place, (owner, name, make) in enumerate(functions):
            plain = getattr(owner, name)
            made.append(make(plain))
            stack.enter_context(patch.object(owner, name, standing(place, name, plain)))
        stack.callback(made.clear)
        del functions, make
        yield others
