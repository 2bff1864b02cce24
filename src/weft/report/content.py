"""The content of a report as plain data: what the page shows, view by view."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias, final

from weft.ir.logical import Call, Input, LogicalGraph
from weft.search.outcome.result import SearchResult
from weft.simulator.results.simulation import Simulation
from weft.traces.rows import RankTrace
from weft.units import ITEM_SIZE

# Slices of a timeline; of more, the shortest are joined until so many are left.
MOST_SLICES = 20_000
# Data as JSON has it.
Data: TypeAlias = "dict[str, Any]"


@final
@dataclass(frozen=True)
class Report:
    """The parts that a report is made of; each part that is not there has no view.

    Attributes:
        title: of the page.
        graph: with layouts, for the view of the model.
        simulation: for what is predicted.
        measured: timelines of a step that ran.
        search: what was tried.
        notes: lines to stand at the top.
    """

    title: str
    graph: LogicalGraph | None = None
    simulation: Simulation | None = None
    measured: Sequence[RankTrace] = ()
    search: SearchResult | None = None
    notes: Sequence[str] = ()

    def data(self) -> Data:
        """All of it as JSON has it: times in microseconds from the begin of the step, sizes in bytes."""
        simulated = self.simulation.traces if self.simulation is not None else ()
        return {
            "title": self.title,
            "notes": list(self.notes),
            "model": list(_modules(self.graph)) if self.graph is not None else [],
            "summary": _summary(self.simulation) if self.simulation is not None else {},
            "timelines": [
                *(_timeline("measured", each) for each in self.measured),
                *(_timeline("predicted", each) for each in simulated),
            ],
            "search": _tried(self.search) if self.search is not None else {},
        }


def _modules(graph: LogicalGraph) -> Iterator[Data]:
    """A row for each parameter and buffer, and for each module with its lines and ops."""
    calls: dict[str, list[Call]] = {}
    for node in graph.of_kind(Call):
        if node.location is not None:
            calls.setdefault(node.location.module, []).append(node)
    for node in graph.of_kind(Input):
        if node.role in ("parameter", "buffer"):
            value, layout = node.value, node.value.layout
            size = ITEM_SIZE.get(value.dtype, 8)
            for length in value.shape:
                size *= length
            yield {
                "path": node.key,
                "role": node.role,
                "shape": list(value.shape),
                "dtype": value.dtype,
                "bytes": size,
                "layout": [] if layout is None else [str(sbp) for sbp in layout.sbp],
                "grid": [] if layout is None else list(layout.placement.shape),
                "ranks": [] if layout is None else list(layout.placement.ranks),
            }
    for path, every in calls.items():
        lines = dict.fromkeys(f"{x.location.file}:{x.location.line}" for x in every if x.location)
        ops: dict[str, int] = {}
        for each in every:
            ops[each.op] = ops.get(each.op, 0) + 1
        yield {"path": path, "role": "module", "lines": list(lines), "ops": ops}


def _summary(simulation: Simulation) -> Data:
    found = simulation.to_json()
    return {
        "text": str(simulation).splitlines(),
        "step_seconds": simulation.step_seconds,
        "memory": found["memory"],
        "ranks": [
            {
                "rank": each.rank,
                "count": each.count,
                "bubble": each.bubble,
                **{name: float(x) for name, x in asdict(each.parts).items() if name != "rank"},
            }
            for each in simulation.ranks
        ],
        "costs": [asdict(each) for each in simulation.costs],
        "path": [asdict(each) for each in simulation.path],
        "estimates": list(simulation.estimates),
    }


def _timeline(group: str, trace: RankTrace) -> Data:
    begin = min((step.begin for step in trace.steps), default=0)
    queues = {name: place for place, (name, _) in enumerate(trace.queues)}
    slices = [
        [
            queues[each.queue],
            (each.begin - begin) / 1000,
            (each.end - each.begin) / 1000,
            each.kind,
            each.name,
            _details(each.details),
        ]
        for each in trace.slices
    ]
    return {
        "group": group,
        "rank": trace.rank,
        "queues": list(queues),
        "slices": _fewer(slices),
        "steps": [[n, (a - begin) / 1000, (b - begin) / 1000] for n, a, b in trace.steps],
        "levels": [[(time - begin) / 1000, size] for time, size in trace.levels],
    }


def _details(details: Mapping[str, str | int]) -> str:
    return ", ".join(f"{name} {value}" for name, value in details.items())


def _fewer(slices: list[list[Any]]) -> list[list[Any]]:
    """As many slices as can be drawn: neighbours of a queue and kind are joined where all are short."""
    least = 0.0
    while len(slices) > MOST_SLICES:
        lengths = sorted(each[2] for each in slices)
        least = max(2 * least, lengths[len(lengths) // 2], 1e-3)
        joined: list[list[Any]] = []
        for each in slices:
            last = joined[-1] if joined else None
            near = last is not None and last[0] == each[0] and last[3] == each[3]
            if near and last is not None and max(last[2], each[2]) <= least:
                last[2] = each[1] + each[2] - last[1]
                last[4], last[5] = "several short acts", ""
            else:
                joined.append(list(each))
        if len(joined) == len(slices):
            return joined
        slices = joined
    return slices


def _tried(search: SearchResult) -> Data:
    found = search.to_json()
    del found["simulation"]
    return {**found, "seconds": search.seconds, "best": search.best.to_text()}
