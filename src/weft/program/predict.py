"""The simulation of a compiled step on the machine at hand, from what was measured of it."""

from __future__ import annotations

from dataclasses import replace

import torch

from weft.compiler.pipeline import Compiled
from weft.hardware.costs import Costs
from weft.hardware.here import costs_here
from weft.ir import LogicalGraph
from weft.planning.plans import as_run, priced_step
from weft.planning.progress import uncollected
from weft.planning.simulated import planned_step
from weft.runtime.world.world import World
from weft.simulator.results.simulation import Simulation
from weft.simulator.steps.planned import PlannedStep


def costs_in(world: World) -> Costs:
    """The costs that were measured on this machine with as many ranks, processes and threads as a world has.

    The usual figures of its device type, marked as estimates, where nothing was.
    """
    processes = world.size // len(world.ranks)
    return costs_here(world.size, world.device_type, processes, torch.get_num_threads())


def predicted(captured: LogicalGraph, compiled: Compiled, costs: Costs) -> Simulation:
    """A compiled step on a machine; needs no other process.

    Args:
        captured: the step as it was captured.
        compiled: its plans.
        costs: of the machine.
    """
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
