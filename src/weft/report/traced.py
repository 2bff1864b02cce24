"""Timelines read back from the file that `Program.trace` writes for viewers."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from weft.traces.events import DATA
from weft.traces.rows import Kind, Level, RankTrace, Slice, StepSpan
from weft.units import Bytes

_PROCESS = re.compile(r"(?:(measured|predicted) )?rank (\d+)")
_STEP = re.compile(r"step (\d+)")
_KINDS: Mapping[str, Kind] = {
    "compute": "compute",
    "communication": "communication",
    "host": "host",
    "wait": "wait",
}
Events: TypeAlias = "list[Mapping[str, Any]]"


def traces_in(content: Any) -> dict[str, list[RankTrace]]:
    """The timelines of a file, "measured" and "predicted", in nanoseconds from the first step.

    Raises:
        LookupError, TypeError, ValueError, AttributeError: it is something else.
    """
    events: dict[int, Events] = {}
    for each in content["traceEvents"]:
        events.setdefault(int(each["pid"]), []).append(each)
    found: dict[str, list[RankTrace]] = {}
    for own in events.values():
        (name,) = (each["args"]["name"] for each in own if each["name"] == "process_name")
        told = _PROCESS.fullmatch(name)
        if told is None:
            raise ValueError(f"a process is called {name!r}")
        found.setdefault(told[1] or "measured", []).append(_trace(int(told[2]), own))
    return {group: sorted(every, key=lambda one: one.rank) for group, every in found.items()}


def _trace(rank: int, events: Events) -> RankTrace:
    queues: dict[int, tuple[str, tuple[int, ...]]] = {}
    for each in events:
        if each["name"] == "thread_name":
            name, _, others = each["args"]["name"].partition(" of ranks ")
            ranks = tuple(int(one) for one in others.split(",")) if others else ()
            queues[int(each["tid"])] = name, ranks
    slices = [
        Slice(
            queues[int(each["tid"])][0],
            str(each["name"]),
            _KINDS[each["cat"]],
            _nanoseconds(each["ts"]),
            _nanoseconds(each["ts"]) + _nanoseconds(each["dur"]),
            dict(each["args"]),
        )
        for each in events
        if each["ph"] == "X" and each["cat"] != DATA
    ]
    waits = [
        StepSpan(
            int(each["args"]["step"]),
            _nanoseconds(each["ts"]),
            _nanoseconds(each["ts"]) + _nanoseconds(each["dur"]),
        )
        for each in events
        if each["ph"] == "X" and each["cat"] == DATA
    ]
    levels = [
        Level(_nanoseconds(each["ts"]), Bytes(int(each["args"]["bytes"])))
        for each in events
        if each["ph"] == "C"
    ]
    return RankTrace(
        *(rank, tuple(queues.values()), tuple(_steps(events)), tuple(slices), (), tuple(levels)),
        tuple(waits),
    )


def _steps(events: Events) -> Iterable[StepSpan]:
    begins: dict[int, int] = {}
    for each in events:
        told = _STEP.fullmatch(str(each["name"])) if each["ph"] in "be" else None
        if told is not None and each["ph"] == "b":
            begins[int(told[1])] = _nanoseconds(each["ts"])
        elif told is not None:
            yield StepSpan(int(told[1]), begins[int(told[1])], _nanoseconds(each["ts"]))


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)
