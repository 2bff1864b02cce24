"""Inspection of a program: predictions, explanations, memory, traces, reports."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import final

from weft.errors import UserError, shown
from weft.hardware.planning_costs import costs_text
from weft.program.explain.beside import BoxTimes, box_times, step_line
from weft.program.explain.details import details as tables
from weft.program.explain.details import details_of
from weft.program.explain.explain import explain, short_html
from weft.program.explain.kernels import kernel_text, replay_text
from weft.program.explain.loading import loading_text
from weft.program.explain.memory import ProgramMemory, program_memory
from weft.program.explain.words import title
from weft.program.parts.core import ProgramCore
from weft.program.predict import costs_in, predicted
from weft.program.trace import Trace, gather_trace
from weft.report import Report, write_report
from weft.runtime.recording import Record
from weft.simulator.results.simulation import Simulation
from weft.units import counted

_log = logging.getLogger("weft")


@final
class ProgramInspection:
    """The pages, tables and figures of a program.

    Args:
        core: of the program.

    Attributes:
        simulated: steps of the plans that were asked for, by the number of the plan.
    """

    def __init__(self, core: ProgramCore) -> None:
        self.simulated: dict[int, Simulation] = {}
        self._core = core

    def line(self) -> str:
        """A line for all: the graph, the batch, the steps."""
        return "; ".join((title(self._core.compiled.graph), f"batch {self._batch}", self._steps))

    def html(self) -> str:
        """A short form of `explain`, for notebooks."""
        compiled, options = self._core.compiled, self._core.setting.options
        more = {"batch": self._batch, "steps": self._steps}
        return short_html(compiled, options, self.memory(), more)

    @property
    def predicted(self) -> Simulation:
        """As `Program.predicted` says."""
        variant = self._core.variants.current
        if variant.number not in self.simulated:
            costs = costs_in(self._core.setting.world)
            found = predicted(variant.captured.graph, variant.compiled, costs)
            self.simulated[variant.number] = found
        return self.simulated[variant.number]

    def explain(self, details: bool, op: str | None) -> str:
        """As `Program.explain` says."""
        compiled, options = self._core.compiled, self._core.setting.options
        if not isinstance(details, bool) or not isinstance(op, str | None):
            raise UserError(
                'program.explain takes details=True or False, and op= as a pattern such as "blocks.0"; found '
                f"details={shown(details)}, op={shown(op)}"
            )
        if op is not None:
            return details_of(compiled, op, self._box_times())
        if not details:
            step = step_line(self.predicted, self.record()[1], self._core.waited)
            return explain(compiled, options, self.memory(), step)
        executors = self._core.executors.values()
        parts = (part for executor in executors for part in executor.distinct_parts)
        text = tables(compiled, self.memory(), self._box_times()) + kernel_text(parts)
        if options.costs is not None:
            text += f"planned by {costs_text(options.costs)}\n"
        text += replay_text(each.replayer for each in executors)
        return text + loading_text(self._core.loading)

    def memory(self) -> ProgramMemory:
        """As `Program.memory` says."""
        executors = self._core.executors
        measured = {rank: executor.measured for rank, executor in executors.items()}
        return program_memory(self._core.compiled.peaks, measured)

    def trace(self, path: str | Path | None = None, predicted: bool = False) -> Trace:
        """As `Program.trace` says."""
        core, world = self._core, self._core.setting.world
        core.enter("trace")
        records = {rank: executor.recorder.record() for rank, executor in core.executors.items()}
        trace = gather_trace(world, core.compiled, records, core.waits, core.loads)
        trace = replace(trace, batch=core.variants.current.name)
        if path is not None and 0 in world.ranks:
            trace.write(path, self.predicted.traces if predicted else ())
        return trace

    def report(self, path: str | Path) -> None:
        """As `Program.report` says."""
        core, trace = self._core, self.trace()
        if 0 in core.setting.world.ranks:
            compiled = core.compiled
            shown = Report(
                *(title(compiled.graph), compiled, self.predicted, trace.ranks),
                notes=self.explain(details=False, op=None).splitlines(),
                strategy=core.setting.strategy,
            )
            write_report(path, shown)

    @contextmanager
    def recording(
        self, path: str | Path | None, trace: Callable[[str | Path | None], Trace]
    ) -> Iterator[None]:
        """As `Program.recording` says; `trace` is the method of the program."""
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
        shown, made = len(trace(path).ranks[0].steps), self._core.steps - before
        if shown < made:
            _log.warning(
                "the trace holds %d of the %d steps that were recorded, those on %s; the others ran by other plans",
                *(shown, made, self._core.variants.current.name),
            )

    def record(self) -> tuple[int, Record]:
        """The first rank of this process, and what it recorded of the last step."""
        rank, executor = next(iter(self._core.executors.items()))
        return rank, executor.recorder.record()

    def _box_times(self) -> BoxTimes:
        rank, record = self.record()
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
