"""Strategies to what they take: each is planned and simulated, once; passes keep what they made for the next."""

from __future__ import annotations

from dataclasses import dataclass, field
from math import inf
from typing import TypeAlias, final, overload

from weft.compiler.kept import KeptResults
from weft.compiler.pipeline import Compiled
from weft.errors import InternalError, UserError
from weft.layout import Placement
from weft.planning.grid import placement_on
from weft.planning.machine import Machine
from weft.planning.plans import plan_stored
from weft.planning.priced import PricedStep, priced_step
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


@final
@dataclass(frozen=True)
class Longer:
    """A strategy that takes longer than was asked for, which is all that is known of it.

    Attributes:
        seconds: that a step takes at least.
    """

    seconds: Seconds


Answer: TypeAlias = Measures | Refused

# Results that are kept of each pass.
KEPT = 4
UNBOUNDED = Seconds(inf)


@final
@dataclass(frozen=True)
class Evaluator:
    """Plans and simulates strategies for a step on a machine.

    Attributes:
        step: as it was captured.
        machine: with at least as many devices as a strategy has ranks.
        ranks: all of the machine's that may be used, in order; rank r runs on device r.
        most_classes: of ranks that are not alike in plans that are made; None for any number.
    """

    step: StoredStep
    machine: Machine
    ranks: tuple[int, ...]
    most_classes: int | None = None
    _known: dict[str, Answer] = field(default_factory=dict, repr=False)
    _longer: dict[str, Longer] = field(default_factory=dict, repr=False)
    _last: list[Simulation] = field(default_factory=list, repr=False)
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
                most_classes=self.most_classes,
            )

    def simulation(self, strategy: Strategy) -> Simulation:
        """The simulation of a strategy, as `weft.simulate` gives it.

        Raises:
            UserError: the step cannot be planned so.
        """
        with uncollected():
            return self._priced(strategy).simulation

    def _priced(self, strategy: Strategy) -> PricedStep:
        compiled = self.compiled(strategy)
        with uncollected():
            planned = planned_step(self.step.graph, compiled, self._kept)
            return priced_step(planned, self.machine.costs)

    @property
    def last(self) -> Simulation | None:
        """The simulation that was made last."""
        return self._last[0] if self._last else None

    def of(self, strategy: Strategy) -> Answer:
        """The measures of a strategy, or why it cannot be planned."""
        # As text: patterns count in their order, which equal mappings need not have.
        key = str(strategy)
        if key not in self._known:
            self._known[key] = self._anew(strategy)
        return self._known[key]

    def within(self, strategy: Strategy, most: Seconds) -> Answer | Longer:
        """The measures of a strategy that takes at most so many seconds; of others only that they take more.

        The busiest queue of the plans is a bound: where that takes longer, nothing is simulated; where the step takes
        longer, what ranks hold is not looked at.
        """
        key = str(strategy)
        longer = self._longer.get(key)
        if longer is not None and longer.seconds > most:
            return longer
        if key not in self._known:
            found = self._anew(strategy, most)
            if isinstance(found, Longer):
                self._longer[key] = found
                return found
            self._known[key] = found
        return self._known[key]

    @overload
    def _anew(self, strategy: Strategy) -> Answer: ...

    @overload
    def _anew(self, strategy: Strategy, most: Seconds) -> Answer | Longer: ...

    def _anew(self, strategy: Strategy, most: Seconds = UNBOUNDED) -> Answer | Longer:
        try:
            priced = self._priced(strategy)
            with uncollected():
                if most != UNBOUNDED:
                    for least in (priced.bound, lambda: priced.ran.step_seconds):
                        if least() > most:
                            return Longer(least())
                self._last[:] = [priced.simulation]
                return measures_of(priced.simulation)
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
