"""The measurements of this machine, as the ranks of one world find them: general calls, or those of a job."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from statistics import median

from weft.capture.optimizers.groups import optimizers_of
from weft.compiler.pipeline import Compiled
from weft.hardware.measured import Measurements, Roofline
from weft.layout import Placement
from weft.ops import flops, has_rule, traffic
from weft.planning.grid import placement_on
from weft.planning.plans import plan_stored
from weft.planning.progress import uncollected
from weft.program.job import Job
from weft.program.measured.general import general_optimizers, general_steps
from weft.program.measured.measure import Patience, measured
from weft.runtime.measured.operands import calls_in_order
from weft.runtime.world.world import World
from weft.strategy.strategy import Strategy, data_parallel
from weft.units import Seconds

# Of the general calls, each is measured for so long.
_PATIENCE = Patience(call=0.01, update=0.02)
# Operations and bytes from which on a call shows how fast a device is, and up to which it shows what any call takes.
_LARGE, _SMALL = 2**22, 2**12


def measured_machine(world: World, begun: Callable[[str], object] = lambda _: None) -> Measurements:
    """General calls, updates, exchanges and overheads, the same on all ranks; every process must call it.

    Args:
        world: of the ranks.
        begun: is told what is measured, on the first rank.
    """
    strategy = data_parallel()
    ranks = Placement(world.device_type, (world.size,), tuple(range(world.size)))
    with uncollected():
        compiled = [
            plan_stored(step, strategy, ranks, world.ranks)
            for step in general_steps(world.size, world.device_type)
        ]
    found = measured(world, compiled, optimizers_of(general_optimizers()), _PATIENCE, begun)
    return replace(found, roofline=roofline(compiled, found))


def measured_job(
    world: World,
    job: Job,
    strategy: Strategy | None = None,
    begun: Callable[[str], object] = lambda _: None,
) -> Measurements:
    """The distinct calls of a job, as `measured_machine`; the model is not run.

    Args:
        world: of the ranks.
        job: whose step.
        strategy: by default data parallel.
        begun: is told what is measured, on the first rank.
    """
    planned = data_parallel() if strategy is None else strategy
    placement = placement_on(world.device_type, world.size, planned)
    with uncollected():
        stored = job.stored(world.device_type, planned)
        compiled = plan_stored(stored, planned, placement, world.ranks)
    return measured(world, [compiled], optimizers_of(job.optimizer), begun=begun)


def roofline(compiled: Iterable[Compiled], measured: Measurements) -> Roofline | None:
    """The few figures of a device that measured calls show; None where there are none of each kind."""
    rates, moving, starts = list[float](), list[float](), list[float]()
    for one in dict.fromkeys(calls_in_order(each for c in compiled for each in c.programs)):
        sample = measured.calls.get(one.text)
        if sample is None or not sample.seconds or not has_rule(one.call.op):
            continue
        work, moved = flops(one.call), traffic(one.call)
        if work > _LARGE and work > moved:
            rates.append(work / sample.seconds)
        elif moved > _LARGE:
            moving.append(moved / sample.seconds)
        elif max(work, moved) < _SMALL:
            starts.append(sample.seconds)
    if not (rates and moving and starts):
        return None
    return Roofline(median(rates), median(moving), Seconds(median(starts)))
