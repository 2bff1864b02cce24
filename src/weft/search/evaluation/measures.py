"""The figures of strategies that a search compares, and the names that strategies are known by."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias, final

from weft.planning.machine import Machine
from weft.simulator.results.simulation import Simulation
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds


@final
@dataclass(frozen=True)
class Measures:
    """The figures of a strategy that are compared.

    Attributes:
        seconds: of a step.
        memory: bytes that the rank with the least room takes, with what its device reserves. Where ranks have unlike
            limits, at most the least of these if all have room, and as many more as the one without room lacks.
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


def memory_of(peaks: Mapping[int, Bytes], machine: Machine) -> Bytes:
    """Bytes that the rank with the least room takes, as `Measures` has them.

    Args:
        peaks: bytes of tensors on each rank when it holds most.
        machine: rank r runs on device r.
    """
    reserves = {rank: machine.costs.capacity(rank).reserve for rank in peaks}
    over, rank = max((peaks[r] + reserves[r] - machine.limit_of(r), -r) for r in peaks)
    total, least = peaks[-rank] + reserves[-rank], machine.least_limit
    if least is None:
        return Bytes(total)
    return Bytes(max(total, least + over) if over > 0 else min(total, least))


def key_of(strategy: Strategy) -> str:
    """A short name of a strategy that no other has.

    Of its text: patterns count in their order, which equal mappings need not have.
    """
    return hashlib.sha256(str(strategy).encode()).hexdigest()[:32]


def measures_of(simulation: Simulation, memory: Bytes) -> Measures:
    """The figures of a simulation that are compared, beside its memory."""
    unused = simulation.bubble * simulation.step_seconds
    idle = Seconds(max(unused - simulation.exposed, 0.0))
    return Measures(simulation.step_seconds, memory, simulation.exposed, idle)
