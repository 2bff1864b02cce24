"""The plans of ranks with the timeline that was simulated for them, and what it says of idle time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import final

from weft.cached import cached_property
from weft.compiler.memory.order import Moment, moments_of
from weft.ir.nodes import Phase
from weft.ir.plan import COMPUTE, Compute, RankPlan
from weft.simulator.timing.one_step import SimulatedStep, Timed, simulate_step
from weft.units import Seconds


@final
@dataclass(frozen=True)
class Scheduled:
    """The decisions about time.

    Attributes:
        name: of the preset, or "computed".
        plans: of the ranks that were planned: of each class of equal ranks the first, and those
            that were asked for.
        seconds: how long acts of the first of each class take; nothing where nothing had to be decided.
        classes: for each rank of the program, the first of those that are like it (`schedule/fold/`).
    """

    name: str
    plans: tuple[RankPlan, ...]
    seconds: Mapping[int, Sequence[Seconds]] = field(default_factory=dict)
    classes: Mapping[int, int] = field(default_factory=dict)

    @cached_property
    def simulation(self) -> SimulatedStep | None:
        """A step in the orders of the plans, of the first of each class, when it is first asked for.

        None where nothing had to be decided.

        Raises:
            InternalError: the plans would hang; the message names the acts that wait for each other.
        """
        if not self.seconds:
            return None
        first = [plan for plan in self.plans if self.classes[plan.rank] == plan.rank]
        return simulate_step(first, self.seconds, fixed=True)

    def prove_live(self) -> None:
        """Prove that the plans cannot hang.

        Raises:
            InternalError: they would.
        """
        _ = self.simulation

    def timeline(self, rank: int) -> tuple[Timed, ...]:
        """The acts of a rank, as simulated; none without a simulation."""
        if self.simulation is None:
            return ()
        return self.simulation.timelines[self.classes[rank]]

    def moments(self, rank: int) -> tuple[Moment, ...] | None:
        """The moments at which the acts of a rank begin and end, in the order of time; None without a simulation."""
        return None if self.simulation is None else tuple(moments_of(self.timeline(rank)))


def busy(scheduled: Scheduled, rank: int) -> dict[Phase, Seconds]:
    """Seconds of a step that a rank's compute queue works for each phase, as simulated."""
    found: dict[Phase, Seconds] = {}
    if scheduled.simulation is not None:
        first = scheduled.classes[rank]
        plan = next(plan for plan in scheduled.plans if plan.rank == first)
        for act in scheduled.timeline(rank):
            actor = plan.actors[act.actor]
            if isinstance(actor, Compute) and actor.queue == COMPUTE:
                before = found.get(actor.phase, 0.0)
                found[actor.phase] = Seconds(before + act.end - act.start)
    return found


def bubble(scheduled: Scheduled, rank: int) -> float:
    """The part of the step's time in which a rank's compute queue has nothing to do, as simulated."""
    simulation = scheduled.simulation
    if simulation is None or not simulation.makespan:
        return 0.0
    return 1 - sum(busy(scheduled, rank).values()) / simulation.makespan


def in_flight(plan: RankPlan, stage: int) -> int:
    """The number of micro-batches that a stage can keep between forward and backward on a rank."""
    actors = plan.actors
    found = (
        register.credits
        for register in plan.registers
        for maker in (actors[register.producer],)
        if isinstance(maker, Compute) and maker.phase.stage == stage and register.rate > 1
        if maker.phase.kind == "forward"
        if any(
            isinstance(reader, Compute) and reader.phase.kind != "forward"
            for reader in (actors[id] for id in register.consumers)
        )
    )
    return max(found, default=1)
