"""Timelines of a report: steps and their time by cause; the memory of ranks by kind, and what is alive at the peak."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any, TypeAlias, final

import numpy as np

from weft.compiler.memory.order import moments_of
from weft.compiler.memory.walk import MemoryWalk, Peak
from weft.compiler.pipeline import Compiled
from weft.ir.alias import KINDS
from weft.ir.logical import Location
from weft.ir.plan import COMPUTE, RankPlan
from weft.simulator.clock import Timed
from weft.traces.events import lines_of, near, stars
from weft.traces.rows import RankTrace, Slice, StepSpan, parts_of
from weft.units import Seconds

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
    by_step: dict[int, dict[tuple[str, str], list[float]]] = {}
    shown = cache(stars)
    for trace in traces:
        exposed = _exposed(trace.slices)
        numbers = step_numbers(trace)
        for each, number, bare in zip(trace.slices, numbers, exposed, strict=True):
            rows = by_step.setdefault(number, {})
            row = rows.setdefault((each.kind, shown(each.name)), [0.0, 0.0, 0])
            row[0] += each.end - each.begin
            row[1] += bare
            row[2] += 1
    kept = _kept(traces)
    return {
        str(number): _largest(rows, len(traces))
        for number, rows in by_step.items()
        if number in kept
    }


def shares(traces: Sequence[RankTrace]) -> dict[str, dict[str, float]]:
    """For the same steps the shares of their time in seconds, the mean of the ranks; see `TimeParts`.

    Computing, exposed communication and idle time add up to the step; hidden communication is beside computing.
    """
    kept = _kept(traces)
    by_step: dict[int, dict[str, float]] = {}
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
            own = by_step.setdefault(number, dict.fromkeys(_SHARES, 0.0))
            for name in _SHARES:
                own[name] += getattr(parts, name) / len(traces)
    return {str(number): own for number, own in by_step.items()}


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
    seconds_exposed: list[float] = np.where(
        talks, np.maximum(ends - begins - hidden, 0.0), 0.0
    ).tolist()
    return seconds_exposed


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


# Ranks whose memory is shown by kind, those of all groups and steps together.
_WALKS = 24
# Points of a curve.
_POINTS = 1_200
# Points of all curves together, and of each at least.
_ALL_POINTS = 120_000
_FEW_POINTS = 32
# Values that are named at the peak.
_NAMED = 40
_NAMES = tuple(dict.fromkeys(KINDS.values()))
# Times, bytes by kind after each moment, and the walk that found them.
_Walked: TypeAlias = "tuple[list[int], list[Counter[str]], MemoryWalk]"


def memory_rows(
    compiled: Compiled | None, groups: Mapping[str, Sequence[RankTrace]]
) -> list[dict[str, Any]]:
    """A row for each rank and step: times, bytes by kind then, and the peak, as JSON has them.

    By kind where the plan of a rank is available, of few ranks and of the last steps; else all kinds together, where a
    trace says so. If there are very many steps, only the last ones have rows.
    """
    rows: list[dict[str, Any]] = []
    ranks = max(sum(map(len, groups.values())), 1)
    most = max(_ALL_POINTS // _FEW_POINTS // ranks, 1)
    steps = sum(min(len(each.steps), most) for traces in groups.values() for each in traces)
    points = max(min(_POINTS, _ALL_POINTS // max(steps, 1)), _FEW_POINTS)
    walker = _Walker(compiled) if compiled is not None else None
    for group, traces in groups.items():
        begin = min((step.begin for each in traces for step in each.steps), default=0)
        for trace in traces:
            for step, first, _ in trace.steps[-most:]:
                last = step == trace.steps[-1].number
                row = walker.row(trace, step, points) if walker is not None and last else None
                row = row or _levels(trace, step, points)
                if row is not None:
                    start = (first - begin) // UNIT
                    rows.append(
                        {"group": group, "rank": trace.rank, "step": step, "from": start, **row}
                    )
    return rows


@final
class _Walker:
    """Walks the acts of traces through the plans that they are of."""

    def __init__(self, compiled: Compiled) -> None:
        schedule = compiled.schedule
        self._plans = {plan.rank: plan for plan in (*schedule.plans, *compiled.plan.ranks)}
        self._classes, self._lines = schedule.classes, lines_of(compiled.graph)
        self._values = compiled.graph.values
        self._left = _WALKS

    def row(self, trace: RankTrace, step: int, points: int) -> dict[str, Any] | None:
        """The memory in a step of a trace; None if no plan is available, or enough ranks were looked at."""
        span = next(span for span in trace.steps if span.number == step)
        acts = [
            Timed(
                int(each.details["actor"]),
                int(each.details.get("micro-batch", 0)),
                Seconds((each.begin - span.begin) / 1e9),
                Seconds((each.end - span.begin) / 1e9),
            )
            for each in trace.slices
            if each.kind != "wait" and each.details.get("step") == step
        ]
        walked = self._found(trace, span, acts) if acts and self._left else None
        if walked is None:
            return None
        plan, (times, levels, walk) = walked
        peak = walk.peak()
        place = max(range(len(levels)), key=lambda each: sum(levels[each].values()), default=0)
        kinds = [kind for kind in _NAMES if any(level[kind] > 0 for level in levels)]
        kept = _thinned([sum(level.values()) for level in levels], points)
        return {
            "kinds": kinds,
            "times": [times[each] for each in kept],
            "levels": [[max(levels[each][kind], 0) for each in kept] for kind in kinds],
            "peak": {"at": times[place], **self._peak(peak, plan)},
        }

    def _found(
        self, trace: RankTrace, span: StepSpan, acts: Sequence[Timed]
    ) -> tuple[RankPlan, _Walked] | None:
        """The plan of a rank and its walk.

        Where it is not available, as of a rank of another process, that of a rank with as many bytes at each moment.
        """
        own = self._plans.get(trace.rank) or self._plans.get(self._classes.get(trace.rank, -1))
        told = [each.bytes for each in trace.levels if span.begin <= each.time <= span.end]
        for plan in self._plans.values() if own is None else (own,):
            if self._left and _fits(plan, acts):
                self._left -= 1
                walked = _walked(plan, acts)
                if own is not None or told == [sum(level.values()) for level in walked[1][1:]]:
                    return plan, walked
        return None

    def _peak(self, peak: Peak, plan: RankPlan) -> dict[str, Any]:
        rows = []
        for each in peak.held[:_NAMED]:
            where = near(_line(each.register, self._lines))
            shape = self._shape(each.register, plan)
            rows.append([each.register, shape, each.versions, each.bytes, where])
        rest = peak.held[_NAMED:]
        if rest:
            rows.append([f"{len(rest)} more", "", len(rest), sum(each.bytes for each in rest), ""])
        return {"bytes": peak.memory.peak, "held": rows}

    def _shape(self, name: str, plan: RankPlan) -> str:
        """Dtype and shape of a value on a rank, also of one that no register holds; "" if that is not known."""
        register, value = plan.register_of.get(name), self._values.get(name)
        if register is not None:
            return f"{register.value.dtype}{list(register.value.shape)}"
        if value is None or value.layout is None:
            return ""
        if plan.rank not in value.layout.placement.coordinates:
            return ""
        return f"{value.dtype}{list(value.layout.local_shape(value.shape, plan.rank))}"


def _fits(plan: RankPlan, acts: Sequence[Timed]) -> bool:
    """True if the acts are those of the plan, each as often as it acts in a step."""
    wanted = Counter(
        {actor.id: getattr(actor, "acts", 1) for own in plan.on_queue.values() for actor in own}
    )
    return Counter(act.actor for act in acts) == wanted


def _walked(plan: RankPlan, acts: Sequence[Timed]) -> _Walked:
    """For each moment of a step its time, in units from its begin, and the bytes that are held after it."""
    walk = MemoryWalk(plan)
    starts = {(act.actor, act.micro): act.start for act in acts}
    ends = {(act.actor, act.micro): act.end for act in acts}
    times, levels = [0], [Counter[str](walk.now)]
    for moment in moments_of(acts):
        walk.take(moment)
        at = (starts if moment.begins else ends)[moment.actor, moment.micro]
        now = Counter[str](walk.now)
        for extra in walk.running.values():
            now.update(extra.kinds)
        now.pop("host", None)
        times.append(max(round(at * 1e9 / UNIT), 0))
        levels.append(now)
    return times, levels, walk


def _line(name: str, lines: Mapping[str, Location]) -> str:
    """The user's line of a value, or of the one that it is another form of."""
    while name:
        if name in lines:
            return str(lines[name])
        name = name.rpartition(".")[0]
    return ""


def _levels(trace: RankTrace, step: int, points: int) -> dict[str, Any] | None:
    """The memory that a trace says, all kinds together."""
    span = next(span for span in trace.steps if span.number == step)
    own = [each for each in trace.levels if span.begin <= each.time <= span.end]
    if not own:
        return None
    top = max(own, key=lambda each: each.bytes)
    kept = [own[place] for place in _thinned([each.bytes for each in own], points)]
    return {
        "kinds": ["all kinds"],
        "times": [(each.time - span.begin) // UNIT for each in kept],
        "levels": [[each.bytes for each in kept]],
        "peak": {"at": (top.time - span.begin) // UNIT, "bytes": top.bytes, "held": []},
    }


def _thinned(sizes: Sequence[int], points: int) -> list[int]:
    """The places of so many values at most: of each run of neighbours the largest, and the last."""
    apart = -(-len(sizes) // max(points, 1))
    runs = (range(first, min(first + apart, len(sizes))) for first in range(0, len(sizes), apart))
    kept = [max(run, key=lambda place: sizes[place]) for run in runs]
    return kept if not sizes or kept[-1] == len(sizes) - 1 else [*kept, len(sizes) - 1]
