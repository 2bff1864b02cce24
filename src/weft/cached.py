"""Properties that are computed once: those of `functools`, without the lock that Python 3.11 and older take for each.

Planning computes some hundred thousand of them; the lock takes longer than most.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar, final, overload

_T = TypeVar("_T")


@final
class cached_property(Generic[_T]):
    """A property computed when first read, then kept in the object's `__dict__`.

    Two threads may both compute it, so the value must not depend on the thread.
    """

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self._make = make
        self._name = make.__name__
        self.__doc__ = make.__doc__

    @overload
    def __get__(self, instance: None, owner: type[Any]) -> cached_property[_T]: ...

    @overload
    def __get__(self, instance: object, owner: type[Any]) -> _T: ...

    def __get__(self, instance: object | None, owner: type[Any]) -> cached_property[_T] | _T:
        if instance is None:
            return self
        found = instance.__dict__[self._name] = self._make(instance)
        return found
