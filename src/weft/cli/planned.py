"""The plan that the options of `weft plan` and `weft simulate` ask for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import final

from weft.compiler.pipeline import Compiled
from weft.planning.folder import write_plan
from weft.planning.machine import Machine, machine_of, parse_grid, placement_on
from weft.planning.plans import plan_stored
from weft.planning.progress import progress, uncollected
from weft.planning.stored_step import StoredStep
from weft.strategy.strategy import Strategy, data_parallel


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
        title: what was planned where, in words.
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
