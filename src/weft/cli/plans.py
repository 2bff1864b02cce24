"""Commands on graph files and reports, without torch: `weft plan`, `weft simulate`, `weft diff`, `weft report`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import final

from weft.atomic_files import write_making_folder
from weft.compiler.pipeline import Compiled
from weft.hardware.costs import read_cost_overrides
from weft.planning.differences import differences
from weft.planning.folder import write_plan
from weft.planning.machine import Machine, machine_of, parse_grid, placement_on
from weft.planning.plans import plan_stored, planned_step, priced_step
from weft.planning.progress import progress, uncollected
from weft.planning.stored_step import StoredStep
from weft.report import Report, write_report
from weft.report.content import write_page
from weft.report.runs import reports_of
from weft.strategy.strategy import Strategy, data_parallel
from weft.traces.events import joined_notes, trace_content


@final
@dataclass(frozen=True)
class PlanOptions:
    """The arguments that both commands take.

    Attributes:
        graph: the graph file.
        strategy: of the plan; None for data parallel in the precision of the file.
        topology: the machine (`machine_of`).
        grid: "16x8", or "" for none.
    """

    graph: Path
    strategy: Strategy | None
    topology: str
    grid: str

    def found(self) -> StoredPlan:
        """Read the file and plan it.

        Raises:
            UserError: something of it cannot be read, or does not fit.
        """
        machine = machine_of(self.topology)
        grid = parse_grid(self.grid) if self.grid else ()
        strategy = self.strategy or data_parallel()
        placement = placement_on(machine.device_type, machine.devices, strategy, grid)
        with uncollected(), progress(first=True) as begin:
            begin("reading the graph file")
            step = StoredStep.load(self.graph)
            strategy = step.in_precision(strategy) if self.strategy is None else strategy
            kinds = machine.kinds(placement.ranks)
            compiled = plan_stored(
                step, strategy, placement, begin=begin, kinds=kinds, costs=machine.planned
            )
        shape = "x".join(map(str, placement.shape))
        title = f"{step.graph.name} on {shape} of {self.topology}"
        if step.device_type != machine.device_type:
            title += f", captured for {step.device_type!r}: its ops are in the form of that device"
        return StoredPlan(step, compiled, machine, title, strategy)


@final
@dataclass(frozen=True)
class StoredPlan:
    """A stored step with its plans.

    Attributes:
        compiled: plans of a rank of each class.
        machine: that it is planned for.
        title: a description of the plan.
        strategy: that it is planned by.
    """

    step: StoredStep
    compiled: Compiled
    machine: Machine
    title: str
    strategy: Strategy


def plan_graph(asked: PlanOptions, output: Path) -> str:
    """Plan a graph file, write the plan to a folder, and return its summary.

    Raises:
        UserError: the step cannot be planned so, or the folder cannot be written.
    """
    found = asked.found()
    return write_plan(found.compiled, found.title, output)


def diff_strategies(
    first: Path, second: Path, graph: Path, topology: str, as_json: bool = False
) -> str:
    """Plan and simulate two strategies, and each difference by itself; returns the text to print.

    Args:
        graph: the graph file.
        topology: the machine (`machine_of`).

    Raises:
        UserError: a file cannot be read, or a strategy cannot be planned.
    """
    pair = Strategy.load(first), Strategy.load(second)
    with progress(first=True) as begin:
        begin("reading the graph file")
        step = StoredStep.load(graph)
        begin("planning the strategies, and what differs between them")
        found = differences(step, *pair, topology)
    return json.dumps(found.to_json()) if as_json else str(found)


@final
@dataclass(frozen=True)
class SimulationFiles:
    """Files to write from a simulation, on request.

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
    """Plan and simulate a graph file; returns the text to print.

    Args:
        costs: a file of costs that replace the machine's.

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
        content = trace_content(simulation.traces)
        write_making_folder(wanted.trace, json.dumps(content), "the timeline")
    if wanted.report is not None:
        notes = joined_notes(found.compiled.notes)
        shown = Report(
            found.title, found.compiled, simulation, notes=notes, strategy=found.strategy
        )
        write_report(wanted.report, shown)
    if as_json:
        return json.dumps({"title": found.title, **simulation.to_json()})
    return "\n".join([found.title, str(simulation), *joined_notes(found.compiled.notes)])


def join_reports(paths: Sequence[Path], output: Path) -> str:
    """Write one page of the reports of pages and folders of runs; returns the text to print.

    Raises:
        UserError: one cannot be read, or the page cannot be written.
    """
    found = reports_of(paths, but=output)
    place = write_page(output, found)
    titles = "".join(f"\n  {each['title']}" for each in found)
    return f"wrote {place}, which shows:{titles}"
