"""Reports read back: pages that were written, and folders of runs with pages, timelines and logs of figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from weft.errors import UNREADABLE, UserError
from weft.report.content import FORMAT, Curve, Data, Report
from weft.traces.events import DATA
from weft.traces.rows import Kind, Level, RankTrace, Slice, StepSpan
from weft.units import Bytes

_DATA = re.compile(r'<script type="application/json" id="data">(.*?)</script>', re.DOTALL)
# Bytes of a file that is read, at most.
MAX_BYTES = 1 << 30
# Points of a curve, at most; of more, every n-th is taken.
_POINTS = 20_000


def reports_of(paths: Sequence[Path], but: Path | None = None) -> list[Data]:
    """The data of the reports of pages and runs, in their order.

    Args:
        paths: of pages, or of folders of runs. A folder contributes its pages (`.html`), the timelines that
            `Program.trace` wrote (`.json`), and the logs of `weft.fit` (`.jsonl`); other files do not.
        but: the page that is to be written, which does not count in a folder.

    Raises:
        UserError: naming the file that cannot be read, or a folder without any.
    """
    own = None if but is None else but.absolute()
    return [
        report for path in paths for report in (_run(path, own) if path.is_dir() else _page(path))
    ]


def _run(folder: Path, but: Path | None) -> list[Data]:
    """The reports of a folder, without one of its files."""
    files = [each for each in _files(folder, "html") if each.absolute() != but]
    pages = [one for each in files if _is_page(each) for one in _page(each)]
    traced = [one for each in _files(folder, "json") for one in _traced(each)]
    logs = _files(folder, "jsonl")
    figures = {name: curve for each in logs for name, curve in _figures(each).items()}
    if not pages and not figures and not traced:
        raise UserError(
            f"the folder {folder} has no report, trace or log: a page of Program.report (.html), a timeline of "
            "Program.trace (.json), or a log of weft.fit (.jsonl); give a folder with one of them"
        )
    reports = [*pages, *traced]
    if figures:
        # For one run there are figures and, mostly, one page.
        own = Report("figures", figures=figures).data()
        reports = [{**reports[0], "figures": own["figures"]}, *reports[1:]] if reports else [own]
    return [{**each, "title": f"{folder.absolute().name}: {each['title']}"} for each in reports]


def _files(folder: Path, ending: str) -> list[Path]:
    return sorted(each for each in folder.glob(f"*.{ending}") if each.is_file())


def _text(path: Path, what: str) -> str:
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
        if len(content) > MAX_BYTES:
            raise UserError(f"{what} {path} is larger than {MAX_BYTES} bytes; give a smaller one")
        return content.decode("utf-8")
    except (OSError, ValueError) as error:  # ValueError: no UTF-8, a zero byte in the path
        why = getattr(error, "strerror", None) or error
        raise UserError(f"cannot read {what} {path}: {why}; give the path of one") from None


def _is_page(path: Path) -> bool:
    """True if a file has a report's data; damage is for who reads it."""
    return _DATA.search(_text(path, "the report")) is not None


def _page(path: Path) -> list[Data]:
    data_of_page = _DATA.search(_text(path, "the report"))
    if data_of_page is None:
        raise UserError(
            f"{path} is not a report of weft; give a page that Program.report or --report wrote, or a run's folder"
        )
    try:
        data: list[Data] = json.loads(data_of_page[1])
        formats = {each["format"] for each in data}
        lacking = [name for each in data for name in Report("").data() if name not in each]
        if formats == {FORMAT} and lacking:
            raise ValueError(f"it lacks {lacking[0]!r}")
    except UNREADABLE as error:
        raise UserError(f"the report {path} is damaged: {error}; write it again") from None
    if formats != {FORMAT}:
        there = ", ".join(map(str, formats))
        raise UserError(
            f"the report {path} is of another version of weft: expected format {FORMAT}, got {there or 'none'}; "
            "write it again"
        )
    return data


def _traced(path: Path) -> Iterator[Data]:
    """The report of a timeline's file; none of another file of JSON."""
    text = _text(path, "the timeline")
    if '"traceEvents"' not in text:
        return
    try:
        content = json.loads(text)
        groups = traces_in(content)
        measured, predicted = (groups.get(group, ()) for group in ("measured", "predicted"))
        data = Report(path.stem, measured=measured, predicted=predicted).data()
    except UNREADABLE as error:
        raise UserError(
            f"{path} is not a timeline of Program.trace ({type(error).__name__}: {error}); write it again, or remove "
            "it from the folder"
        ) from None
    # With its arrows, which are not read back.
    yield {**data, "trace": data["trace"] and content}


def _figures(path: Path) -> dict[str, Curve]:
    """The curves of a log, by name; none of lines without steps."""
    # Steps that a run has made again, as after a restart, count as they were made last.
    points: dict[str, dict[int, float]] = {}
    try:
        lines = _text(path, "the log").splitlines()
        for row in (dict(json.loads(line)) for line in lines if line.strip()):
            if "step" not in row:
                return {}
            step = int(float(row.pop("step")))
            for name, value in row.items():
                if value is not None:
                    points.setdefault(str(name), {})[step] = float(value)
    except UNREADABLE as error:
        raise UserError(
            f"{path} is not a log of weft.fit ({type(error).__name__}: {error}); expected a step and numbers in each "
            "row; repair it, or remove it from the folder"
        ) from None
    return {name: _curve(sorted(own.items())) for name, own in points.items()}


def _curve(points: Sequence[tuple[int, float]]) -> Curve:
    apart = -(-len(points) // _POINTS)
    kept = points[:: max(apart, 1)]
    return [step for step, _ in kept], [value for _, value in kept]


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
    traces: dict[str, list[RankTrace]] = {}
    for own in events.values():
        (name,) = (each["args"]["name"] for each in own if each["name"] == "process_name")
        told = _PROCESS.fullmatch(name)
        if told is None:
            raise ValueError(f"a process is called {name!r}")
        traces.setdefault(told[1] or "measured", []).append(_trace(int(told[2]), own))
    return {group: sorted(every, key=lambda one: one.rank) for group, every in traces.items()}


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
            *_span(each),
            dict(each["args"]),
        )
        for each in events
        if each["ph"] == "X" and each["cat"] != DATA
    ]
    waits = [
        StepSpan(int(each["args"]["step"]), *_span(each))
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


def _span(event: Mapping[str, Any]) -> tuple[int, int]:
    begin = _nanoseconds(event["ts"])
    return begin, begin + _nanoseconds(event["dur"])


def _nanoseconds(microseconds: float) -> int:
    return round(microseconds * 1000)
