"""Strategies to what they take: each is planned and simulated, once; passes keep what they made for the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeAlias, final

from weft.compiler.kept import KeptResults
from weft.compiler.pipeline import Compiled
from weft.errors import InternalError, UserError
from weft.layout import Placement
from weft.planning.grid import placement_on
from weft.planning.machine import Machine
from weft.planning.plans import plan_stored
from weft.planning.priced import priced_step
from weft.planning.progress import uncollected
from weft.planning.simulated import planned_step
from weft.planning.stored_step import StoredStep
from weft.simulator.results.simulation import Simulation
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds


@final
@dataclass(frozen=True)
class Measures:
    """The figures of a strategy that are compared.

    Attributes:
        seconds: of a step.
        memory: bytes that the rank with the least room takes, with what its device reserves.
        exposed: seconds in which compute queues wait for exchanges, the mean of all ranks.
        idle: seconds in which they do nothing else either.
    """

    seconds: Seconds
    memory: Bytes
    exposed: Seconds
    idle: Seconds

    @property
    def computing(self) -> Seconds:
        """Seconds in which compute queues work."""
        return Seconds(self.seconds - self.exposed - self.idle)


@final
@dataclass(frozen=True)
class Refused:
    """A strategy that cannot be planned, and why."""

    why: str


Answer: TypeAlias = Measures | Refused

# Results that are kept of each pass.
KEPT = 4


@final
@dataclass(frozen=True)
class Evaluator:
    """Plans and simulates strategies for a step on a machine.

    Attributes:
        step: as it was captured.
        machine: with at least as many devices as a strategy has ranks.
        ranks: all of the machine's that may be used, in order; rank r runs on device r.
    """

    step: StoredStep
    machine: Machine
    ranks: tuple[int, ...]
    _known: dict[str, Answer] = field(default_factory=dict, repr=False)
    _kept: KeptResults = field(default_factory=lambda: KeptResults(KEPT), repr=False)

    def placement(self, strategy: Strategy) -> Placement:
        """The ranks of a strategy, as its grid says.

        Raises:
            UserError: when there are fewer devices.
        """
        machine = self.machine
        found = placement_on(machine.device_type, len(self.ranks), strategy)
        if isinstance(strategy.stages, tuple) and strategy.stages:
            return found
        return Placement(found.device_type, found.shape, self.ranks[: len(found.ranks)])

    def compiled(self, strategy: Strategy) -> Compiled:
        """The plans of a strategy, of one rank of each class.

        Raises:
            UserError: the step cannot be planned so.
        """
        placement, machine = self.placement(strategy), self.machine
        with uncollected():
            return plan_stored(
                self.step,
                strategy,
                placement,
                kinds=machine.kinds(placement.ranks),
                costs=machine.planned,
                kept=self._kept,
            )

    def simulation(self, strategy: Strategy) -> Simulation:
        """The simulation of a strategy, as `weft.simulate` gives it.

        Raises:
            UserError: the step cannot be planned so.
        """
        compiled = self.compiled(strategy)
        with uncollected():
            return priced_step(
                planned_step(self.step.graph, compiled), self.machine.costs
            ).simulation

    def of(self, strategy: Strategy) -> Answer:
        """The measures of a strategy, or why it cannot be planned."""
        # As text: patterns count in their order, which equal mappings need not have.
        key = str(strategy)
        if key not in self._known:
            self._known[key] = self._anew(strategy)
        return self._known[key]

    def _anew(self, strategy: Strategy) -> Answer:
        try:
            return measures_of(self.simulation(strategy))
        except UserError as error:
            return Refused(str(error))
        except InternalError as error:
            # A plan that gets stuck, or a pass that does not know the combination: one strategy fewer, no wrong one.
            return Refused(f"weft cannot plan it: {error}")


def measures_of(simulation: Simulation) -> Measures:
    """The figures of a simulation that are compared."""
    memory = simulation.memory.total if simulation.memory is not None else Bytes(0)
    unused = simulation.bubble * simulation.step_seconds
    idle = Seconds(max(unused - simulation.exposed, 0.0))
    return Measures(simulation.step_seconds, memory, simulation.exposed, idle)
