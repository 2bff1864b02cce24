"""The cache of passes: results keyed by the input of a pass and the options that it read.

A search plans nearly the same step many times, so only the differing parts are computed again. The
cache compares by content; graphs and programs that it returned before are the same objects, which compare equal at
once. A plan with the cache equals the plan without it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import reduce
from typing import Any, TypeVar, cast, final

Made = TypeVar("Made")
# Results that are kept of each pass while strategies are compared.
KEPT = 4


class ReadInParts:
    """An object of which a pass reads few attributes: the cache compares those alone."""


@final
@dataclass(frozen=True, eq=False)
class PassCache:
    """The last results of functions that depend on nothing but their arguments.

    Attributes:
        most: results that are kept of each function; 0 keeps nothing.
    """

    most: int = 0
    _results: dict[object, list[tuple[list[Any], Any]]] = field(default_factory=dict, repr=False)

    def of(self, make: Callable[..., Made], *given: Any, at: object = None) -> Made:
        """The result of `make(*given)`, from the cache if an earlier call had and read the same.

        Args:
            make: a function of a module.
            given: its arguments; an object that is `ReadInParts` gives the attributes that `make` reads.
            at: tells apart calls that take turns, such as those of stages and ranks.
        """
        if not self.most:
            return make(*given)
        known = self._results.setdefault((make, at), [])
        for number, (before, _) in enumerate(known):
            if all(
                one.reads_the_same(now)
                if isinstance(one, _RecordedReads)
                else one is now or bool(one == now)
                for one, now in zip(before, given, strict=False)
            ):
                known.insert(0, known.pop(number))
                break
        else:
            read = [
                _RecordedReads(each) if isinstance(each, ReadInParts) else each for each in given
            ]
            known.insert(0, (read, make(*read)))
            del known[self.most :]
        return cast(Made, known[0][1])


@final
class _RecordedReads:
    """An object that notes which of its attributes are read, and of those of them that are read in parts."""

    def __init__(
        self,
        of: ReadInParts,
        path: tuple[str, ...] = (),
        seen: dict[tuple[str, ...], object] | None = None,
    ) -> None:
        self._of, self._path = of, path
        self._seen: dict[tuple[str, ...], object] = {} if seen is None else seen

    def __getattr__(self, name: str) -> Any:
        value, path = getattr(self._of, name), (*self._path, name)
        if isinstance(value, ReadInParts):
            return _RecordedReads(value, path, self._seen)
        self._seen[path] = value
        return value

    def reads_the_same(self, other: object) -> bool:
        """True if another object has, for all that was read, what was read."""
        found = ((reduce(getattr, path, other), value) for path, value in self._seen.items())
        return all(one is value or one == value for one, value in found)
