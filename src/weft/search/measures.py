"""The figures of strategies that a search compares, and the names that strategies are known by."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias, final

from weft.compiler.memory.walk import Peak
from weft.planning.machine import Machine
from weft.simulator.simulation import Simulation
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds


@final
@dataclass(frozen=True)
class Measures:
    """The figures of a strategy that are compared.

    Attributes:
        seconds: of a step.
        memory: bytes that the rank with the least room takes, with what its device reserves. If ranks have unlike
            limits, at most the least of these if all have room, and as many more as the one without room lacks.
        exposed: seconds in which compute queues wait for exchanges, the mean of all ranks.
        idle: seconds in which they neither work nor wait for exchanges.
        parts: bytes as `memory` of the acts of a micro-batch (0 without any), and of those of a step; none where that
            is not known.
    """

    seconds: Seconds
    memory: Bytes
    exposed: Seconds
    idle: Seconds
    parts: tuple[Bytes, ...] = field(default=(), compare=False)

    @property
    def computing(self) -> Seconds:
        """Seconds in which compute queues work."""
        return Seconds(self.seconds - self.exposed - self.idle)


@final
@dataclass(frozen=True)
class Unplannable:
    """A strategy that cannot be planned, and why."""

    why: str


@final
@dataclass(frozen=True)
class TooSlow:
    """A strategy known only to take longer than the limit of the question."""

    seconds: Seconds


Answer: TypeAlias = Measures | Unplannable


def along(one: Measures, two: Measures, times: float) -> Measures:
    """The measures as far from one as `times` the way to the other."""
    return Measures(
        Seconds(one.seconds + times * (two.seconds - one.seconds)),
        Bytes(int(one.memory + times * (two.memory - one.memory))),
        Seconds(max(one.exposed + times * (two.exposed - one.exposed), 0.0)),
        Seconds(max(one.idle + times * (two.idle - one.idle), 0.0)),
    )


def memory_of(peaks: Mapping[int, Bytes], machine: Machine) -> Bytes:
    """Bytes that the rank with the least room takes, as `Measures` has them.

    Args:
        peaks: bytes of tensors on each rank when it holds most.
        machine: rank r runs on device r.
    """
    reserves = {rank: machine.costs.capacity(rank).reserve for rank in peaks}
    lacks = {r: peaks[r] + reserves[r] - machine.limit_of(r) for r in peaks}
    rank = min(lacks, key=lambda r: (-lacks[r], r))
    over, total, least = lacks[rank], peaks[rank] + reserves[rank], machine.least_limit
    if least is None:
        return Bytes(total)
    return Bytes(max(total, least + over) if over > 0 else min(total, least))


def key_of(strategy: Strategy) -> str:
    """A short, unique name of a strategy.

    The key is the strategy's text: patterns count in their order, which equal mappings need not have.
    """
    return hashlib.sha256(str(strategy).encode()).hexdigest()[:32]


def measures_of(simulation: Simulation, moments: Iterable[Peak], machine: Machine) -> Measures:
    """The figures that are compared of a simulation, and of the moments when ranks hold most."""
    found = tuple(moments)
    unused = simulation.bubble * simulation.step_seconds
    idle = Seconds(max(unused - simulation.exposed, 0.0))
    ranks = [peak.rank for peak in found]
    sizes = zip(*((p.memory.peak, p.of_micro_batch, p.of_step) for p in found), strict=True)
    memory, *parts = (memory_of(dict(zip(ranks, each, strict=True)), machine) for each in sizes)
    return Measures(simulation.step_seconds, memory, simulation.exposed, idle, tuple(parts))
