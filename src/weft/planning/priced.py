"""A planned step on a machine: what its acts cost, and, when it is asked, how long it takes and what ranks hold."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import final

from weft.cached import cached_property
from weft.compiler.memory.order import moments_of
from weft.compiler.memory.walk import Peak, memory
from weft.compiler.plans.specialize import with_joined_sums
from weft.hardware.costs import Costs
from weft.hardware.given_costs import GivenCosts
from weft.hardware.measured import MeasuredCosts
from weft.simulator.results.simulation import Simulation
from weft.simulator.simulate import SteadySteps, costs_of, simulation_of, steady_steps
from weft.simulator.steps.acts import ActCosts
from weft.simulator.steps.planned import PlannedStep
from weft.units import Bytes, Seconds


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


def priced_step(step: PlannedStep, costs: Costs, given: GivenCosts | None = None) -> PricedStep:
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
