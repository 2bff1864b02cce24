"""`weft simulate`: a planned step on a machine that need not be there."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import final

from weft.atomic_files import write_making_folder
from weft.cli.planned import PlanOptions
from weft.hardware.cost_overrides import read_cost_overrides
from weft.planning.plans import planned_step, priced_step
from weft.planning.progress import uncollected
from weft.report import Report, write_report
from weft.simulator.simulation import Simulation
from weft.traces.events import joined_notes, trace_events


@final
@dataclass(frozen=True)
class SimulationFiles:
    """Files to write of a simulation, where they are asked for.

    Attributes:
        trace: the timeline of a step, for Perfetto.
        report: a page that shows it.
    """

    trace: Path | None = None
    report: Path | None = None


def simulate_graph(
    asked: PlanOptions,
    costs: Path | None = None,
    files: SimulationFiles | None = None,
    as_json: bool = False,
) -> str:
    """Plan and simulate a graph file; returns what is to be printed.

    Args:
        costs: a file of costs that count in place of the machine's.

    Raises:
        UserError: the step cannot be planned so, or a file cannot be read or written.
    """
    given = None if costs is None else read_cost_overrides(costs)
    found = asked.found()
    with uncollected():
        step = planned_step(found.step.graph, found.compiled)
        simulation = priced_step(step, found.machine.costs, given).simulation
    wanted = files or SimulationFiles()
    if wanted.trace is not None:
        _write_trace(simulation, wanted.trace)
    if wanted.report is not None:
        notes = joined_notes(found.compiled.notes)
        shown = Report(
            found.title, found.compiled, simulation, notes=notes, strategy=found.strategy
        )
        write_report(wanted.report, shown)
    if as_json:
        return json.dumps({"title": found.title, **simulation.to_json()})
    return "\n".join([found.title, str(simulation), *joined_notes(found.compiled.notes)])


def _write_trace(simulation: Simulation, path: Path) -> None:
    content = {"traceEvents": trace_events(simulation.traces), "displayTimeUnit": "ms"}
    write_making_folder(path, json.dumps(content), "the timeline")
