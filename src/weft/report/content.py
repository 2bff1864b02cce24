"""The content of a report as plain data: what the page shows, view by view."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from math import isfinite
from pathlib import Path
from typing import Any, TypeAlias, final

from weft.atomic_files import write_making_folder
from weft.compiler.pipeline import Compiled
from weft.errors import wrong
from weft.report.modules import model_rows
from weft.report.sent_matrix import sent_bytes
from weft.report.timelines import from_work, memory_rows, step_rows
from weft.search.result import SearchResult
from weft.simulator.simulation import Simulation
from weft.strategy.strategy import Strategy
from weft.traces.events import trace_content
from weft.traces.rows import RankTrace

# For the data of a page: pages of other formats are not read back.
FORMAT = 2
# Data as JSON has it.
Data: TypeAlias = "dict[str, Any]"
# A figure of a run: its steps and values.
Curve: TypeAlias = "tuple[Sequence[int], Sequence[float | None]]"
# Rows of what a search looked at.
_MOST_LOOKS = 20_000
# Slices of timelines that a page holds for Perfetto; of more, none.
MOST_SLICES = 20_000


@final
@dataclass(frozen=True)
class Report:
    """The parts of a report; a missing part has no view.

    Attributes:
        title: of the page.
        compiled: the plan, for the views of the model, of bytes and of memory.
        simulation: for what is predicted.
        measured: timelines of steps that ran.
        search: what was tried.
        notes: lines to be at the top.
        strategy: that the plan was made by, for reasons.
        predicted: timelines, where there is no simulation that has them.
        figures: of a run, by name, such as its loss.
    """

    title: str
    compiled: Compiled | None = None
    simulation: Simulation | None = None
    measured: Sequence[RankTrace] = ()
    search: SearchResult | None = None
    notes: Sequence[str] = ()
    strategy: Strategy | None = None
    predicted: Sequence[RankTrace] = ()
    figures: Mapping[str, Curve] = field(default_factory=dict)

    def data(self) -> Data:
        """The whole report as JSON data.

        Times of timelines and of memory are in tenths of a microsecond from the begin of the first step, others in
        seconds; sizes in bytes.
        """
        simulation = self.simulation
        predicted = simulation.traces if simulation is not None else self.predicted
        groups = {"measured": self.measured, "predicted": from_work(predicted)}
        slices = sum(len(each.slices) for each in (*self.measured, *predicted))
        return {
            "format": FORMAT,
            "title": self.title,
            "notes": list(self.notes),
            "model": {} if self.compiled is None else model_rows(self.compiled, self.strategy),
            "sent": {} if self.compiled is None else sent_bytes(self.compiled),
            "summary": {} if simulation is None else _summary(simulation),
            "time": [step_rows(group, traces) for group, traces in groups.items() if traces],
            "trace": trace_content(self.measured, predicted) if 0 < slices <= MOST_SLICES else {},
            "memory": memory_rows(self.compiled, groups),
            "search": {} if self.search is None else _searched(self.search),
            "figures": {
                name: [list(steps), list(map(finite, values))]
                for name, (steps, values) in self.figures.items()
            },
        }


def _summary(simulation: Simulation) -> Data:
    content = simulation.to_json()
    return {
        "text": str(simulation).splitlines(),
        "step_seconds": simulation.step_seconds,
        "memory": content["memory"],
        "ranks": [
            {
                "rank": each.rank,
                "count": each.count,
                "bubble": each.bubble,
                "hidden": each.parts.hidden,
                **{name: float(x) for name, x in asdict(each.parts).items() if name != "rank"},
            }
            for each in simulation.ranks
        ],
        "costs": [asdict(each) for each in simulation.costs],
        "path": [asdict(each) for each in simulation.path],
        "estimates": list(simulation.estimates),
    }


def _searched(search: SearchResult) -> Data:
    content = search.to_json()
    del content["simulation"]
    course = search.course
    apart = -(-len(course) // _MOST_LOOKS)
    chains = list(dict.fromkeys(each.chain for each in course))
    places = {chain: place for place, chain in enumerate(chains)}
    return {
        **content,
        "seconds": search.seconds,
        "best": search.best.to_text(),
        "chains": chains,
        # For many, some are shown, and all that became the best.
        "course": [
            [each.after, places[each.chain], each.seconds, each.best, finite(each.bound)]
            for place, each in enumerate(course)
            if place % max(apart, 1) == 0 or each.best == each.seconds
        ],
    }


def finite(number: float | None) -> float | None:
    """The number; None for NaN and infinities."""
    return number if number is None or isfinite(number) else None


def all_finite(data: Any) -> Any:
    """Plain data with None for each number that is not finite."""
    if isinstance(data, dict):
        return {name: all_finite(each) for name, each in data.items()}
    if isinstance(data, list | tuple):
        return [all_finite(each) for each in data]
    return finite(data) if isinstance(data, float) else data


# Errors call it so.
REPORT = "the report"
# The parts of the page's script, in order.
_SCRIPTS = (
    *("base.js", "summary.js", "model.js", "canvas.js", "time.js", "memory.js", "bytes.js"),
    *("search.js", "run.js", "compare.js", "views.js"),
)


def page_of(reports: Sequence[Data]) -> str:
    """One HTML file of the data of some reports, side by side; it needs nothing else."""
    folder = files("weft.report")
    template, style, *scripts = (
        folder.joinpath(name).read_text(encoding="utf-8")
        for name in ("template.html", "report.css", *(f"scripts/{name}" for name in _SCRIPTS))
    )
    # "<" would end the script. Non-ASCII characters are escaped already.
    data = _json(list(reports)).replace("<", "\\u003c")
    title = html.escape(" | ".join(each["title"] for each in reports))
    parts = {"title": title, "style": style, "data": data, "script": "".join(scripts)}
    # At once: what is put in may hold such a name.
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], template)


def _json(reports: list[Data]) -> str:
    """The data as a browser reads it."""
    try:
        return json.dumps(reports, separators=(",", ":"), allow_nan=False)
    except ValueError:
        return json.dumps(all_finite(reports), separators=(",", ":"), allow_nan=False)


def write_report(path: str | Path, *reports: Report) -> Path:
    """Write reports, one or several to compare, as one HTML file; missing folders are made.

    Raises UserError where it cannot be written.
    """
    return write_page(path, [each.data() for each in reports])


def write_page(path: object, reports: Sequence[Data]) -> Path:
    """Write the data of reports as one HTML file; raises UserError where it cannot be written."""
    if not isinstance(path, str | Path) or not str(path).isprintable():
        raise wrong("the path of a report", "the path of a file", path)
    write_making_folder(path, page_of(reports), REPORT)
    return Path(path)
