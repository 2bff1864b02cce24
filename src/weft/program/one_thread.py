"""Methods that one thread at a time may call: a second one is told, where it would spoil what the first one does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

from weft.errors import UserError

P = ParamSpec("P")
T = TypeVar("T")


class Working(Protocol):
    """Something with a lock that is held while it works; the thread that holds it may call on."""

    working: threading.RLock


Own = TypeVar("Own", bound=Working)


def one_at_a_time(call: Callable[Concatenate[Own, P], T]) -> Callable[Concatenate[Own, P], T]:
    """A method that refuses to begin while another thread is in one of the same object.

    Raises:
        UserError: names the method.
    """

    @wraps(call)
    def alone(self: Own, /, *args: P.args, **kwargs: P.kwargs) -> T:
        if not self.working.acquire(blocking=False):
            raise UserError(
                f"program.{call.__name__} was called while another thread works with the program; call it from one "
                "thread at a time, with a lock around it where several do"
            )
        try:
            return call(self, *args, **kwargs)
        finally:
            self.working.release()

    return alone
