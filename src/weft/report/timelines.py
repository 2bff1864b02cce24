"""The steps of timelines, in tenths of a microsecond; their time by cause, and its shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

from weft.ir.plan import COMPUTE
from weft.traces.events import stars
from weft.traces.rows import RankTrace, Slice, parts_of

# Nanoseconds of a unit.
UNIT = 100
# Causes that are told of each step.
_CAUSES = 24
# Steps of which causes are told, the longest and the last.
_STEPS = 64
_SHARES = ("step", "compute", "exposed", "hidden", "idle")


def step_rows(group: str, traces: Sequence[RankTrace]) -> dict[str, Any]:
    """The steps of some ranks on one clock as JSON data: `group` is "measured" or "predicted"."""
    begin = min((step.begin for each in traces for step in each.steps), default=0)
    return {
        "group": group,
        "ranks": len(traces),
        "steps": _steps(traces, begin),
        "totals": totals(traces),
        "shares": shares(traces),
    }


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
