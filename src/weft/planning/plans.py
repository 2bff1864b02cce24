"""Plans of a stored step, as `weft.compile` would run them, and simulations of these: `weft.simulate`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Protocol, final, runtime_checkable

from weft.cached import cached_property
from weft.compiler.context import options_of
from weft.compiler.memory.order import moments_of
from weft.compiler.memory.walk import Peak, memory
from weft.compiler.pass_cache import PassCache
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.plans.specialize import with_joined_sums
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import split_parameters, strategy_hints
from weft.errors import StrategyError, check, is_whole, wrong
from weft.hardware import CostModel
from weft.hardware.costs import CostOverrides, Costs, read_cost_overrides
from weft.hardware.measured_costs import MeasuredCosts
from weft.hardware.topology import Topology
from weft.ir import LogicalGraph
from weft.ir.logical import Input
from weft.layout import Placement
from weft.planning.machine import HERE, machine_of, placement_on
from weft.planning.progress import uncollected
from weft.planning.stored_step import StoredStep, batch_size
from weft.simulator.acts import ActCosts
from weft.simulator.planned import PlannedStep, step_flops
from weft.simulator.simulate import SteadySteps, costs_of, simulation_of, steady_steps
from weft.simulator.simulation import Simulation
from weft.strategy.precision import Precision, precision_of
from weft.strategy.strategy import Strategy, data_parallel
from weft.units import Bytes, Seconds


def plan_stored(
    step: StoredStep,
    strategy: Strategy,
    placement: Placement,
    ranks: tuple[int, ...] | None = None,
    begin: Callable[[str], None] = lambda _: None,
    kinds: Mapping[int, int] = MappingProxyType({}),
    costs: Costs | None = None,
    cost_model: CostModel | None = None,
    cache: PassCache = PassCache(),  # noqa: B008 (keeps nothing)
    most_classes: int | None = None,
) -> Compiled:
    """The plans of a stored step; equal to the bit to those that `weft.compile` makes of the step itself.

    Args:
        step: from a graph file.
        strategy: the user's.
        placement: of all ranks.
        ranks: to plan; None for one of each class of equal ranks.
        begin: called with the name of each phase that begins.
        kinds: for each rank the number of its kind of device, where there are several.
        costs: of the machine that it is planned for; None for the usual devices of the type.
        cost_model: what deduction minimises; None for bytes, by which a strategy keeps its meaning at all sizes,
            `weft.hardware.costs` for seconds on a machine.
        cache: results of passes from plans that were made before; all are the same without.
        most_classes: of ranks that are not alike; None for any number.

    Raises:
        StrategyError: the step was captured for another precision, or with other parameters of recurrent layers in
            pieces; or the strategy does not fit the step.
        LayoutError: a layout does not fit a tensor.
        RuleError: no signature of an op fits the layouts.
        UserError: the plan takes more memory than the strategy's limit; or more ranks are not alike.
    """
    check_captured_for(step, strategy)
    options = options_of(strategy)
    options = replace(options, modules=step.modules, costs=costs, most_classes=most_classes)
    if cost_model is not None:
        options = replace(options, cost_model=cost_model)
    hints = strategy_hints(strategy, step.graph, stage_placements(options.stages, placement))
    return compile_graph(
        step.graph, hints, placement, ranks, options, begin=begin, kinds=kinds, cache=cache
    )


def check_captured_for(step: StoredStep, strategy: Strategy) -> None:
    """Check that a capture with this strategy gives the same step.

    Raises:
        StrategyError: when it does not.
    """
    precision = (precision_of(strategy.precision) or Precision()).captured
    again = "capture it with that strategy: weft capture … --strategy FILE"
    if precision != step.precision:
        captured = step.precision.content() or "none"
        raise StrategyError(
            f"the strategy has the precision {precision.content() or 'none'}, the step was captured for {captured}; "
            f"give the strategy that precision (an entry of its file), or {again}"
        )
    names = [node.key for node in step.graph.of_kind(Input) if node.role == "parameter"]
    differ = (split_parameters(strategy, names) ^ step.apart) & step.recurrent
    if differ:
        name = min(differ)
        split, captured = ("whole", "split") if name in step.apart else ("split", "whole")
        raise StrategyError(
            f"the strategy has {name} of a recurrent layer {split}, the step was captured for a {captured} one; {again}"
        )


@final
@dataclass(frozen=True)
class PricedStep:
    """A planned step whose acts have costs.

    Attributes:
        step: what runs.
        acts: seconds of its acts.
        costs: of the machine.
    """

    step: PlannedStep
    acts: ActCosts
    costs: Costs

    @cached_property
    def ran(self) -> SteadySteps:
        """Steps, one after the other, until they take equally long."""
        return steady_steps(self.step, self.acts, self.costs)

    @cached_property
    def simulation(self) -> Simulation:
        """All that is known; what ranks hold is that of the order of time which the simulation finds."""
        return simulation_of(replace(self.step, peaks=self.peaks), self.acts, self.costs, self.ran)

    @cached_property
    def moments(self) -> tuple[Peak, ...]:
        """The moment when each rank with a plan holds most, in that order."""
        lines = self.ran.timelines()
        return tuple(memory(each, moments_of(lines[each.rank])) for each in self.step.plans)

    @cached_property
    def peaks(self) -> Mapping[int, Bytes]:
        """Bytes that each rank with a plan holds then."""
        return {each.rank: each.memory.peak for each in self.moments}

    def bound(self) -> Seconds:
        """Seconds that a step takes at least: those of the busiest queue."""
        found = Seconds(0.0)
        for plan in self.step.plans:
            seconds = self.acts.seconds(plan.rank)
            for own in plan.on_queue.values():
                busy = sum(actor.acts * seconds[actor.id] for actor in own)
                found = max(found, Seconds(busy))
        return found


def priced_step(step: PlannedStep, costs: Costs, given: CostOverrides | None = None) -> PricedStep:
    """A planned step on a machine.

    Args:
        step: as it is planned.
        costs: of the machine. If they were measured, calls count as they run: sums of products in one.
        given: costs that count in place of the machine's, where there are some.

    Raises:
        UserError: when an override names something that is not in the plans.
    """
    step = as_run(step) if isinstance(costs, MeasuredCosts) else step
    return PricedStep(step, costs_of(step, costs, given), costs)


def as_run(step: PlannedStep) -> PlannedStep:
    """A step with its calls as they run, for costs that were measured of these."""
    return replace(step, plans=tuple(map(with_joined_sums, step.plans)))


class CapturableStep(Protocol):
    """A step that is captured on request: `weft.Job`, `weft.Step`, `weft.Program`."""

    def stored(self, device_type: str = "cpu", strategy: Strategy | None = None) -> StoredStep:
        """The captured step, as a graph file holds it."""


@runtime_checkable
class PlacedProgram(CapturableStep, Protocol):
    """A step that was compiled: `weft.Program`."""

    @property
    def strategy(self) -> Strategy:
        """The user's."""

    @property
    def placement(self) -> Placement:
        """All its ranks."""


def simulate(
    step: StoredStep | CapturableStep | str | Path,
    strategy: Strategy | None = None,
    topology: str | Path | Topology = HERE,
    *,
    grid: Sequence[int] = (),
    costs: CostOverrides | str | Path | None = None,
) -> Simulation:
    """Plan a step for a machine and simulate it; needs no torch where the step comes from a file.

    Args:
        step: the path of a graph file; or a `weft.Job`, `weft.Step` or `weft.Program`, which is captured for the CPU.
        strategy: by default a program's own, else data parallel in the precision of a graph file.
        topology: a name of the catalogue with a number of devices ("h100x512"), the path of a `.yaml` file, or a
            topology; rank r runs on device r. "here" for this machine as `weft measure` found it, with as many ranks as
            a program has, else as many as cores; "herex4" with 4.
        grid: the number of ranks along each axis of the strategy; by default a program's own where its strategy is
            taken, else as `placement_on` takes it.
        costs: measured costs in place of the machine's, or the file of them.

    Raises:
        UserError: a file cannot be read, the step cannot be planned so, or this machine was not measured.
        CaptureError: the step cannot be one graph.
    """
    if not isinstance(strategy, Strategy | None):
        expected = "a weft.Strategy, such as weft.data_parallel()"
        remedy = "a file of one is read by weft.Strategy.load"
        raise wrong("weft.simulate: strategy", expected, strategy, remedy=remedy)
    whole = isinstance(grid, tuple | list) and all(is_whole(each, 1) for each in grid)
    named = 'a name such as "h100x8" or "here", the path of a .yaml file or a topology'
    check(
        "weft.simulate",
        (whole, "grid", "the number of ranks along each axis, whole numbers such as (2, 4)", grid),
        (isinstance(topology, str | Path | Topology), "topology", named, topology),
        (
            isinstance(costs, CostOverrides | str | Path | None),
            *("costs", "the path of a .yaml file of measured costs", costs),
        ),
    )
    planned, shape, ranks = strategy or data_parallel(), tuple(grid), None
    if isinstance(step, PlacedProgram):
        ranks = len(step.placement.ranks)
        if strategy is None:
            planned = step.strategy
            stages = isinstance(planned.stages, int) or not planned.stages
            shape = shape or (step.placement.shape if stages else ())
    machine = machine_of(topology, ranks)
    placement = placement_on(machine.device_type, machine.devices, planned, shape)
    given = read_cost_overrides(costs) if isinstance(costs, str | Path) else costs
    found = as_stored(step, planned)
    if strategy is None and not isinstance(step, PlacedProgram):
        planned = found.in_precision(planned)
    with uncollected():
        kinds = machine.kinds(placement.ranks)
        compiled = plan_stored(found, planned, placement, kinds=kinds, costs=machine.planned)
        return priced_step(planned_step(found.graph, compiled), machine.costs, given).simulation


def as_stored(step: StoredStep | CapturableStep | str | Path, strategy: Strategy) -> StoredStep:
    """A step as graph files hold it: read, captured, or as it is.

    Args:
        step: the path of a graph file; or a `weft.Job`, `weft.Step` or `weft.Program`, which is captured for the CPU.
        strategy: that it is captured for.

    Raises:
        UserError: it is none of these, or cannot be read.
        CaptureError: the step cannot be one graph.
    """
    if isinstance(step, str | Path):
        return StoredStep.load(step)
    if isinstance(step, StoredStep):
        return step
    if not hasattr(step, "stored"):
        raise wrong(
            "step", "the path of a graph file, a weft.Job, a weft.Step or a weft.Program", step
        )
    return step.stored(strategy=strategy)


def planned_step(
    captured: LogicalGraph,
    compiled: Compiled,
    cache: PassCache = PassCache(),  # noqa: B008 (keeps nothing)
) -> PlannedStep:
    """A planned step, with all that a simulation has to know.

    Args:
        captured: the step as it was captured: its operations are the model's, nothing recomputed.
        compiled: its plans, of one rank of each class.
        cache: what is known of this step from before.
    """
    size = cache.of(batch_size, captured)
    work, _ = cache.of(step_flops, captured)
    schedule, placements = compiled.schedule, compiled.stages.placements
    return PlannedStep(
        compiled.graph,
        compiled.plan.ranks,
        compiled.plan.communicators,
        tuple(sorted({rank for placement in placements for rank in placement.ranks})),
        schedule.classes,
        compiled.families,
        work=work,
        samples=size.samples,
        tokens=size.tokens,
    )
