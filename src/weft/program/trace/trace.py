"""Trace: when every act of some steps ran, on all ranks; what queues waited for; where the time went."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import final

from weft.program.explain.tables import table, text_of
from weft.traces.events import trace_events
from weft.traces.rows import RankTrace, TimeParts, parts
from weft.units import Seconds
from weft.whole_files import write_in_folder

_COLUMNS = (
    "rank",
    "step",
    "compute",
    "communication",
    "hidden",
    "exposed",
    "late ranks",
    "idle",
    "data",
)


@final
@dataclass(frozen=True)
class Trace:
    """The traces of all ranks for some steps. Prints as a table of where the time went.

    Attributes:
        ranks: the rows of each rank, on one clock.
        batch: the leaves of the batch that the steps were planned for.
    """

    ranks: tuple[RankTrace, ...]
    batch: str = ""

    def __iter__(self) -> Iterator[RankTrace]:
        return iter(self.ranks)

    @cached_property
    def parts(self) -> tuple[TimeParts, ...]:
        """The shares of each rank's time, in seconds a step."""
        return tuple(map(parts, self.ranks))

    @property
    def exposed(self) -> Seconds:
        """Seconds a step in which compute queues wait while communicators act: the mean of the ranks."""
        return Seconds(sum(each.exposed for each in self.parts) / len(self.parts))

    def write(self, path: str | Path, predicted: Sequence[RankTrace] = ()) -> None:
        """Write it for ui.perfetto.dev or chrome://tracing; folders that are missing are made.

        Args:
            predicted: the timelines of ranks to stand beside it, in processes of their own.

        Raises:
            UserError: it cannot be written.
        """
        if predicted:
            behind = 1 + max(each.rank for each in self.ranks)
            events = trace_events(self.ranks, "measured")
            events += trace_events(predicted, "predicted", behind)
        else:
            events = trace_events(self.ranks)
        content = {
            "displayTimeUnit": "ms",
            "traceEvents": events,
            "otherData": {"batch": self.batch},
        }
        write_in_folder(path, json.dumps(content), "the timeline")

    def __str__(self) -> str:
        rows = (
            (
                str(each.rank),
                *map(_text, (each.step, each.compute, each.communication)),
                *map(_text, (each.hidden, each.exposed, each.late, each.idle, each.data)),
            )
            for each in self.parts
        )
        on = f" on {self.batch}" if self.batch else ""
        return text_of(table(f"where the time of a step{on} goes", _COLUMNS, rows))


def _text(seconds: Seconds) -> str:
    return f"{1000 * seconds:.3g} ms"
