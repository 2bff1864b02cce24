"""A stored step, a strategy and a placement to plans: what `weft.compile` would run there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import final

from weft.cached import cached_property
from weft.compiler.context import PassCache, options_of
from weft.compiler.memory.order import moments_of
from weft.compiler.memory.walk import Peak, memory
from weft.compiler.pipeline import Compiled, compile_graph
from weft.compiler.plans.specialize import with_joined_sums
from weft.compiler.stages.stages import stage_placements
from weft.compiler.strategy_hints import split_parameters, strategy_hints
from weft.errors import StrategyError
from weft.hardware import CostModel
from weft.hardware.cost_overrides import CostOverrides
from weft.hardware.costs import Costs
from weft.hardware.measured_costs import MeasuredCosts
from weft.ir.logical import Input
from weft.layout import Placement
from weft.planning.stored_step import StoredStep
from weft.simulator.results.simulation import Simulation
from weft.simulator.simulate import SteadySteps, costs_of, simulation_of, steady_steps
from weft.simulator.steps.acts import ActCosts
from weft.simulator.steps.planned import PlannedStep
from weft.strategy.precision import Precision, precision_of
from weft.strategy.strategy import Strategy
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
    kept: PassCache = PassCache(),  # noqa: B008 (keeps nothing)
    most_classes: int | None = None,
) -> Compiled:
    """The plans of a stored step; equal to the bit to those that `weft.compile` makes of the step itself.

    Args:
        step: from a graph file.
        strategy: the user's.
        placement: of all ranks.
        ranks: to plan; None for one of each class of equal ranks.
        begin: is told what begins.
        kinds: for each rank the number of its kind of device, where there are several.
        costs: of the machine that it is planned for; None for the usual devices of the type.
        cost_model: what deduction minimises; None for bytes, by which a strategy keeps its meaning at all sizes,
            `weft.hardware.costs` for seconds on a machine.
        kept: results of passes from plans that were made before; all are the same without.
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
        step.graph, hints, placement, ranks, options, begin=begin, kinds=kinds, kept=kept
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
        costs: of the machine. Where they were measured, calls count as they run: sums of products in one.
        given: costs that count in place of the machine's, where there are some.

    Raises:
        UserError: when a cost is given for what is not in the plans.
    """
    step = as_run(step) if isinstance(costs, MeasuredCosts) else step
    return PricedStep(step, costs_of(step, costs, given), costs)


def as_run(step: PlannedStep) -> PlannedStep:
    """A step with its calls as they run, for costs that were measured of these."""
    return replace(step, plans=tuple(map(with_joined_sums, step.plans)))
