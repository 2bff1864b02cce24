"""Trials of the search, and what they find: a target beside what was measured."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any, TypeAlias, final

import weft
from weft.errors import UserError
from weft.planning.stored_step import StoredStep


@final
@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        what: was looked at.
        target: what must hold, in words.
        measured: what was found, in words.
        held: true where the target is; None where there is none.
        why: the term that causes a miss, or what a figure hangs on.
        figures: the numbers behind the words, in seconds, bytes and counts.
    """

    what: str
    target: str
    measured: str
    held: bool | None = None
    why: str = ""
    figures: dict[str, Any] | None = None


# From the seconds that a search may take to what was found.
Run: TypeAlias = Callable[[float], Sequence[Finding]]


@final
@dataclass(frozen=True)
class Trial:
    """Something that is tried in a process of its own.

    Attributes:
        name: of the trial, "<part>/<what>".
        run: does it.
        limit: seconds after which it is stopped.
    """

    name: str
    run: Run
    limit: float = 900.0

    @property
    def part(self) -> str:
        """The part of the benchmark that it belongs to."""
        return self.name.partition("/")[0]


def seconds_text(seconds: float) -> str:
    """Milliseconds, or seconds from one second on."""
    return f"{seconds:.3f} s" if seconds >= 1 else f"{1e3 * seconds:.2f} ms"


@final
@dataclass(frozen=True)
class Searched:
    """A search that found something, and how long it took.

    Attributes:
        result: of `weft.search`.
        took: seconds of the clock.
    """

    result: weft.SearchResult
    took: float

    def __str__(self) -> str:
        best = next(each for each in self.result.tried if each.outcome == "best")
        return f"{best.name} {seconds_text(self.result.seconds)}"

    @property
    def left(self) -> str:
        """How many points were planned, and how many were not, by the reason."""
        skipped = (f"{count} {why}" for why, count in self.result.skipped.items() if count)
        return f"{len(self.result.tried)} planned; {', '.join(skipped)}"


def searched(step: StoredStep, topology: str, **options: Any) -> Searched | str:
    """A search, timed; or why it found nothing."""
    begin = perf_counter()
    try:
        return Searched(weft.search(step, topology, **options), perf_counter() - begin)
    except UserError as error:
        return str(error)[:200]
