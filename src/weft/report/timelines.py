"""Timelines in few bytes, in tenths of a microsecond; the time of steps by cause, and its shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.ir.plan import COMPUTE
from weft.simulator.facts import PathAct
from weft.traces.events import near, stars
from weft.traces.rows import RankTrace, Slice, parts_of

# Causes that are told of each step.
_CAUSES = 24
# Steps of which causes are told, the longest and the last.
_STEPS = 64
_SHARES = ("step", "compute", "exposed", "hidden", "idle")


def totals(traces: Sequence[RankTrace]) -> dict[str, list[list[Any]]]:
    """For steps, seconds by cause, the mean of the ranks: kind, name, seconds, exposed seconds, times."""
    found: dict[int, dict[tuple[str, str], list[float]]] = {}
    shown = cache(stars)
    for trace in traces:
        exposed = _exposed(trace.slices)
        numbers = step_numbers(trace)
        for each, number, bare in zip(trace.slices, numbers, exposed, strict=True):
            rows = found.setdefault(number, {})
            row = rows.setdefault((each.kind, shown(each.name)), [0.0, 0.0, 0])
            row[0] += each.end - each.begin
            row[1] += bare
            row[2] += 1
    kept = _kept(traces)
    return {
        str(number): _largest(rows, len(traces)) for number, rows in found.items() if number in kept
    }


def shares(traces: Sequence[RankTrace]) -> dict[str, dict[str, float]]:
    """For the same steps the shares of their time in seconds, the mean of the ranks; see `TimeParts`.

    Computing, exposed communication and idle time add up to the step; hidden communication is beside computing.
    """
    kept = _kept(traces)
    found: dict[int, dict[str, float]] = {}
    for trace in traces:
        spans = {span.number: (span.begin, span.end) for span in trace.steps}
        acts: dict[tuple[int, str], list[tuple[int, int]]] = {}
        for each, number in zip(trace.slices, step_numbers(trace), strict=True):
            if number in kept and (each.kind == "communication" or _computes(each)):
                acts.setdefault((number, each.kind), []).append((each.begin, each.end))
        for number in spans.keys() & kept:
            computing, communicating = (
                acts.get((number, kind), ()) for kind in ("compute", "communication")
            )
            parts = parts_of(trace.rank, [spans[number]], computing, communicating)
            own = found.setdefault(number, dict.fromkeys(_SHARES, 0.0))
            for name in _SHARES:
                own[name] += getattr(parts, name) / len(traces)
    return {str(number): own for number, own in found.items()}


def _kept(traces: Sequence[RankTrace]) -> set[int]:
    """The longest steps and the last."""
    lengths = dict[int, int]()
    for trace in traces:
        for span in trace.steps:
            lengths[span.number] = max(lengths.get(span.number, 0), span.end - span.begin)
    longest = sorted(lengths, key=lambda number: -lengths[number])[: _STEPS // 2]
    return {*longest, *sorted(lengths)[-_STEPS // 2 :]}


def _computes(each: Slice) -> bool:
    return each.kind == "compute" and each.queue == COMPUTE


def _largest(rows: Mapping[tuple[str, str], Sequence[float]], ranks: int) -> list[list[Any]]:
    """The largest causes, the others of each kind as one."""
    every = sorted(rows.items(), key=lambda item: -item[1][0])
    others: dict[str, list[float]] = {}
    for (kind, _), row in every[_CAUSES:]:
        own = others.setdefault(kind, [0.0, 0.0, 0])
        others[kind] = [a + b for a, b in zip(own, row, strict=True)]
    shown = [*every[:_CAUSES], *(((kind, "all others"), row) for kind, row in others.items())]
    return [
        [kind, name, took / ranks / 1e9, bare / ranks / 1e9, times]
        for (kind, name), (took, bare, times) in shown
    ]


def step_numbers(trace: RankTrace) -> list[int]:
    """The step of each slice: as it says, or the one that runs when it begins."""
    starts = np.array([span.begin for span in trace.steps], dtype=np.int64)
    begins = np.array([each.begin for each in trace.slices], dtype=np.int64)
    places = np.maximum(np.searchsorted(starts, begins, side="right") - 1, 0).tolist()
    numbers = [span.number for span in trace.steps] or [0]
    return [
        int(each.details.get("step", numbers[place]))
        for each, place in zip(trace.slices, places, strict=True)
    ]


def _exposed(slices: Sequence[Slice]) -> list[float]:
    """Nanoseconds of each communication beside which the rank computes nothing; 0 of other slices."""
    busy = sorted(
        (each.begin, each.end) for each in slices if _computes(each) and each.end > each.begin
    )
    if not busy:
        return [float(s.end - s.begin) if s.kind == "communication" else 0.0 for s in slices]
    # Acts of the compute queue follow one another.
    edges = np.array(busy, dtype=np.float64).reshape(-1)
    edges = np.maximum.accumulate(edges)
    lengths = np.repeat(np.cumsum(edges[1::2] - edges[::2]), 2)
    covered = np.concatenate(([0.0], lengths[:-1]))
    begins = np.array([each.begin for each in slices], dtype=np.float64)
    ends = np.array([each.end for each in slices], dtype=np.float64)
    hidden = np.interp(ends, edges, covered) - np.interp(begins, edges, covered)
    talks = np.array([each.kind == "communication" for each in slices])
    found: list[float] = np.where(talks, np.maximum(ends - begins - hidden, 0.0), 0.0).tolist()
    return found


# Slices of a report; of more, short neighbours on a queue are joined until about so many are left.
MOST_SLICES = 300_000
# Nanoseconds of a unit.
UNIT = 100
Numbers: TypeAlias = npt.NDArray[np.int64]


@final
@dataclass
class Words:
    """Texts by number, each once."""

    texts: list[str] = field(default_factory=list)
    _places: dict[str, int] = field(default_factory=dict)

    def of(self, text: str) -> int:
        """The number of a text."""
        place = self._places.setdefault(text, len(self.texts))
        if place == len(self.texts):
            self.texts.append(text)
        return place


@final
@dataclass
class Timelines:
    """The timelines of a report: `data` is what the page reads.

    Attributes:
        most: slices that are kept, of all groups together.
        words: names and details, that slices name by number.
        kinds: rows of kind, name and details, each once.
    """

    most: int = MOST_SLICES
    words: Words = field(default_factory=Words)
    kinds: list[tuple[str, int, int]] = field(default_factory=list)
    _kinds: dict[tuple[object, ...], int] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)

    def add(self, group: str, traces: Sequence[RankTrace], path: Sequence[PathAct] = ()) -> None:
        """Add the timelines of some ranks, which are on one clock.

        Args:
            group: "measured" or "predicted".
            traces: of the ranks.
            path: acts of the critical path, in seconds on the same clock.
        """
        if not traces:
            return
        begin = min((step.begin for each in traces for step in each.steps), default=0)
        each = max(self.most // len(traces), 16)
        self.groups.append(
            {
                "group": group,
                "steps": _steps(traces, begin),
                "totals": totals(traces),
                "shares": shares(traces),
                "ranks": [self._rank(trace, begin, each) for trace in traces],
                "path": [
                    [
                        each.rank,
                        each.queue,
                        round((each.start * 1e9 - begin) / UNIT),
                        round((each.end - each.start) * 1e9 / UNIT),
                        self.words.of(each.name),
                        each.micro,
                    ]
                    for each in path
                ],
            }
        )

    def data(self) -> dict[str, Any]:
        """The timelines as JSON data."""
        kinds = [list(each) for each in self.kinds]
        return {"words": self.words.texts, "kinds": kinds, "groups": self.groups}

    def _rank(self, trace: RankTrace, begin: int, most: int) -> dict[str, Any]:
        """The columns of a rank: slices by queue and begin; begins as differences from slice to slice."""
        places = {name: place for place, (name, _) in enumerate(trace.queues)}
        rows = [
            (
                places[each.queue],
                (each.begin - begin) // UNIT,
                -((begin - each.end) // UNIT),
                self._kind(each),
                int(each.details.get("micro-batch", -1)),
            )
            for each in trace.slices
        ]
        every = np.array(rows, dtype=np.int64).reshape(-1, 5)
        table = self._fewer(np.c_[every, every[:, 2] - every[:, 1]], most)
        table = table[np.lexsort((table[:, 2], table[:, 1], table[:, 0]))]
        queue, begins, ends, kind, micro, busy = table.T
        took = np.maximum(ends - begins, 1)
        full = np.minimum(100 * busy // took, 100)
        return {
            "rank": trace.rank,
            "queues": list(places),
            "queue": queue.tolist(),
            "begin": np.diff(begins, prepend=0).tolist(),
            "took": (ends - begins).tolist(),
            "kind": kind.tolist(),
            "micro": micro.tolist() if (micro >= 0).any() else [],
            # Of slices that stand for several, the part of their time that these take, in hundredths.
            "full": full.tolist() if len(table) < len(every) else [],
        }

    def _kind(self, each: Slice) -> int:
        """The number of a kind of slices; what differs from act to act is left out."""
        told = tuple(
            item for item in each.details.items() if item[0] not in ("step", "micro-batch")
        )
        key = (each.kind, each.name, told)
        place = self._kinds.get(key)
        if place is None:
            details = near(", ".join(f"{name} {value}" for name, value in told))
            place = self._number(each.kind, each.name, details)
            self._kinds[key] = place
        return place

    def _number(self, kind: str, name: str, details: str) -> int:
        self.kinds.append((kind, self.words.of(name), self.words.of(details)))
        return len(self.kinds) - 1

    def _fewer(self, table: Numbers, most: int) -> Numbers:
        """At most as many slices as can be drawn: short neighbours of one queue and kind are joined.

        Args:
            table: queue, begin, end, number of the kind, micro-batch, time that acts take of each slice.
            most: slices to be left, about.
        """
        if len(table) <= most:
            return table
        least, span = 0, int(table[:, 2].max() - table[:, 1].min())
        sort = np.array([_SORTS.index(kind) for kind, _, _ in self.kinds])[table[:, 3]]
        order = np.lexsort((table[:, 1], sort, table[:, 0]))
        table, sort = table[order], sort[order]
        while len(table) > most and least <= span:
            took = table[:, 2] - table[:, 1]
            least = max(2 * least, int(np.median(took)), 1)
            short, same = took <= least, (sort[1:] == sort[:-1]) & (table[1:, 0] == table[:-1, 0])
            near = table[1:, 1] - table[:-1, 2] <= least
            follows = np.concatenate(([False], short[1:] & short[:-1] & same & near))
            # A few of a kind become one at a time, so that a timeline of equal acts keeps its shape.
            place = np.arange(len(table))
            run = place - np.maximum.accumulate(np.where(follows, 0, place))
            first = np.flatnonzero(~follows | (run % _JOINED == 0))
            # One slice from each of `first` to the next.
            found: Numbers = table[first].copy()
            found[:, 2] = np.maximum.reduceat(table[:, 2], first)
            found[:, 5] = np.add.reduceat(table[:, 5], first)
            for row in np.flatnonzero(np.diff(first, append=len(table)) > 1).tolist():
                found[row, 3:5] = self._several(self.kinds[found[row, 3]][0]), -1
            table, sort = found, sort[first]
        return table

    def _several(self, kind: str) -> int:
        key = (kind,)
        if key not in self._kinds:
            self._kinds[key] = self._number(kind, "several short acts", "")
        return self._kinds[key]


_SORTS = ("compute", "communication", "host", "wait")
_JOINED = 4


def from_work(traces: Sequence[RankTrace]) -> list[RankTrace]:
    """The timelines with each step starting at its first device act; host acts may begin long before."""
    begins: dict[int, int] = {}
    for trace in traces:
        for each, number in zip(trace.slices, step_numbers(trace), strict=True):
            if each.kind != "host":
                begins[number] = min(begins.get(number, each.begin), each.begin)
    return [
        replace(
            trace,
            steps=tuple(
                span._replace(begin=begins.get(span.number, span.begin)) for span in trace.steps
            ),
        )
        for trace in traces
    ]


def _steps(traces: Sequence[RankTrace], begin: int) -> list[list[int]]:
    """Each step from the first rank's begin to the last one's end: number, begin, end."""
    spans: dict[int, tuple[int, int]] = {}
    for each in traces:
        for number, first, last in each.steps:
            known = spans.get(number, (first, last))
            spans[number] = min(known[0], first), max(known[1], last)
    return [
        [number, (first - begin) // UNIT, (last - begin) // UNIT]
        for number, (first, last) in sorted(spans.items())
    ]
