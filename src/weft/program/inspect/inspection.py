"""Inspection of a program: predictions, explanations, memory, traces, reports."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from weft.compiler.pipeline import Compiled
from weft.errors import UserError, shown
from weft.hardware.costs import Costs
from weft.hardware.measured_store import load_measured_costs
from weft.hardware.planning_costs import costs_text
from weft.ir import LogicalGraph
from weft.planning.plans import as_run, planned_step, priced_step
from weft.planning.progress import uncollected
from weft.program.core import ProgramCore, ProgramPart, one_at_a_time
from weft.program.inspect.details import BoxTimes, box_times, details_of, step_line
from weft.program.inspect.details import details as tables
from weft.program.inspect.summary import explain, short_html, title
from weft.program.inspect.tables import (
    ProgramMemory,
    RankMemory,
    cuda_graphs_text,
    kernel_text,
    loading_text,
)
from weft.program.inspect.trace import Trace, gather_trace
from weft.report import Report, write_report
from weft.runtime.recording import Record
from weft.simulator.planned import PlannedStep
from weft.simulator.simulation import Simulation
from weft.units import counted

_log = logging.getLogger("weft")


class ProgramInspection(ProgramPart):
    """The pages, tables and figures of a program."""

    def __init__(self, core: ProgramCore) -> None:
        super().__init__(core)
        # Steps of the plans that were asked for, by the number of the plan.
        self._simulated: dict[int, Simulation] = {}

    def __repr__(self) -> str:
        about = title(self._core.compiled.graph), f"batch {self._batch}", self._steps
        return f"<weft.Program: {'; '.join(about)}>"

    def _repr_html_(self) -> str:
        """A short form of `explain`, which notebooks show; it simulates nothing and asks no other process."""
        compiled, options = self._core.compiled, self._core.setting.options
        more = {"batch": self._batch, "steps": self._steps}
        return short_html(compiled, options, self.memory(), more)

    @property
    def predicted(self) -> Simulation:
        """A step of the current plan on this machine, simulated on first use.

        Its costs are those that `weft measure` measured here for as many ranks, processes and threads. Without
        them, and for calls that were not measured, costs are estimates, which `estimates` of the result lists.
        """
        variant = self._core.variants.current
        if variant.number not in self._simulated:
            world = self.world
            costs = load_measured_costs(
                world.size, world.device_type, world.processes, torch.get_num_threads()
            )
            found = predicted(variant.captured.graph, variant.compiled, costs)
            self._simulated[variant.number] = found
        return self._simulated[variant.number]

    def explain(self, details: bool = False, op: str | None = None) -> str:
        """Describe the program in about 25 lines: the time of a step, bytes sent, memory, and the bottleneck.

        The times of the step and of every boxing are given as `predicted` and as measured by this process's
        first rank in the last step. Other times are estimates from shapes; bytes and memory are those of the plan.

        Args:
            details: all tables: inputs, layouts, every boxing with its bytes and cause, buckets,
                memory of each rank, the schedule, kernels.
            op: a pattern of modules ("blocks.0", which stands for what is below it, too),
                lines ("model.py:30"), ops ("aten.mm.*") or names of parameters and leaves of the
                batch: the rows of these tables that match.

        Raises:
            UserError: when nothing matches `op`.
        """
        compiled, options = self._core.compiled, self._core.setting.options
        if not isinstance(details, bool) or not isinstance(op, str | None):
            raise UserError(
                'program.explain takes details=True or False, and op= as a pattern such as "blocks.0"; got '
                f"details={shown(details)}, op={shown(op)}"
            )
        if op is not None:
            return details_of(compiled, op, self._box_times())
        if not details:
            step = step_line(self.predicted, self._record()[1], self._core.waited)
            return explain(compiled, options, self.memory(), step)
        executors = self._core.executors.values()
        parts = (part for executor in executors for part in executor.distinct_parts)
        text = tables(compiled, self.memory(), self._box_times()) + kernel_text(parts)
        if options.costs is not None:
            text += f"planned by {costs_text(options.costs)}\n"
        text += "".join(cuda_graphs_text(each.replayer) for each in executors)
        return text + loading_text(self._core.loading)

    def memory(self) -> ProgramMemory:
        """The memory peak of each rank of this process by kind: as planned, and as measured in the first step.

        Steps of `verify` do not count.
        """
        executors = self._core.executors
        measured = {rank: executor.measured for rank, executor in executors.items()}
        ranks = (
            RankMemory(x.rank, x.memory, measured.get(x.rank)) for x in self._core.compiled.peaks
        )
        return ProgramMemory(tuple(ranks))

    @one_at_a_time
    def trace(self, path: str | Path | None = None, predicted: bool = False) -> Trace:
        """The times of every act of the last step, on all ranks, and the waits of their queues.

        It includes the shapes of the step's batch. Every process must call it. After `recording`,
        the trace holds all steps of it until the next step begins.

        Args:
            path: where the first rank writes it, for ui.perfetto.dev or chrome://tracing; a row for
                each queue of each rank.
            predicted: write the predicted step beside it, of the ranks that stand for all: in processes of their own,
                "measured rank 0" and "predicted rank 0", which begin at the same time.

        Raises:
            UserError: when there was no step yet, or it cannot be written.
            RankFailure: when another process does not call it before the world's time-out.
        """
        core, world = self._core, self.world
        core.enter("trace")
        records = {rank: executor.recorder.record() for rank, executor in core.executors.items()}
        trace = gather_trace(world, core.compiled, records, core.waits, core.loads)
        trace = replace(trace, batch=core.variants.current.name)
        if path is not None and 0 in world.ranks:
            trace.write(path, self.predicted.traces if predicted else ())
        return trace

    @one_at_a_time
    def report(self, path: str | Path) -> None:
        """Write a page that shows layouts of the model, and time and memory of the last step and of the predicted one.

        One HTML file, which opens from disk without a network. Every process must call it, after a step; the first
        writes. After `recording`, it shows all steps of it.

        Args:
            path: of the file.

        Raises:
            UserError: when there was no step yet, or it cannot be written.
        """
        core, trace = self._core, self.trace()
        if 0 in self.world.ranks:
            compiled = core.compiled
            shown = Report(
                *(title(compiled.graph), compiled, self.predicted, trace.ranks),
                notes=self.explain(details=False, op=None).splitlines(),
                strategy=core.setting.strategy,
            )
            write_report(path, shown)

    @contextmanager
    def recording(self, path: str | Path | None = None) -> Iterator[None]:
        """Trace all steps made inside, and write them at the end as `trace` does.

        Every process must enter it, and make the same steps. When a step fails nothing is written. Steps of another
        plan than the last one, as for other shapes, are left out, which the log "weft" says.
        """
        before = self._core.steps
        recorders = [executor.recorder for executor in self._core.executors.values()]
        for recorder in recorders:
            recorder.clear()
            recorder.keeping = True
        try:
            yield
        finally:
            for recorder in recorders:
                recorder.keeping = False
        shown, made = len(self.trace(path).ranks[0].steps), self._core.steps - before
        if shown < made:
            _log.warning(
                "the trace holds %d of the %d steps that were recorded, those on %s; the others ran by other plans",
                *(shown, made, self._core.variants.current.name),
            )

    def _record(self) -> tuple[int, Record]:
        rank, executor = next(iter(self._core.executors.items()))
        return rank, executor.recorder.record()

    def _box_times(self) -> BoxTimes:
        rank, record = self._record()
        compiled = self._core.compiled
        plan = next(plan for plan in compiled.plan.ranks if plan.rank == rank)
        return box_times(compiled, plan, self.predicted, record)

    @property
    def _batch(self) -> str:
        return self._core.variants.current.name

    @property
    def _steps(self) -> str:
        made = f"{counted(self._core.steps, 'step')} made"
        return made if self._core.is_open else "closed"


def predicted(captured: LogicalGraph, compiled: Compiled, costs: Costs) -> Simulation:
    """A compiled step on a machine; needs no other process."""
    with uncollected():
        return priced_step(_stands(captured, compiled), costs).simulation


def planned_as_run(captured: LogicalGraph, compiled: Compiled) -> PlannedStep:
    """A compiled step with the plans of the ranks that stand for all, and its calls as they run."""
    return as_run(_stands(captured, compiled))


def _stands(captured: LogicalGraph, compiled: Compiled) -> PlannedStep:
    step = planned_step(captured, compiled)
    classes = compiled.schedule.classes
    if not classes:  # they do not differ in what they do when
        return replace(step, plans=step.plans[:1])
    stand = set(classes.values())
    return replace(step, plans=[p for p in compiled.schedule.plans if p.rank in stand])
