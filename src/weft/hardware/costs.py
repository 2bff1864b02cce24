"""Costs: seconds of calls, updates and exchanges on the ranks of some machine, whatever they are taken from.

`Device` is one, of a few figures for all ranks; `weft.hardware.given` has tables that a user gives; topologies
with device kinds are another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

from weft.ir.plan_nodes import CollectiveKind
from weft.ops import OpCall
from weft.units import NO_BYTES, NO_TIME, Bytes, Seconds

# Groups of ranks that run the same collective at the same time.
Groups: TypeAlias = Sequence[Sequence[int]]
# Bytes that go from a rank to a rank, all at the same time.
Sent: TypeAlias = Sequence[tuple[int, int, Bytes]]


class LinkUse(Protocol):
    """The links that a communication needs. Equal ones need the same, and are one where they run at the same time."""

    def busy(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
        """Numbers of resources of the machine, each once, and the seconds in which each is needed whole."""

    def __hash__(self) -> int:
        """That of what is used."""


@final
class Cost(NamedTuple):
    """The seconds of something that runs.

    Attributes:
        seconds: expected.
        spread: relative standard deviation; 0 where none is known.
        estimate: where a figure was missing, what it is that was guessed; else empty.
        links: of a communication, those that it may share with others; None where that is not known.
    """

    seconds: Seconds
    spread: float = 0.0
    estimate: str = ""
    links: LinkUse | None = None


@final
class Slowdown(NamedTuple):
    """Factors by which calls and communications of one device take longer beside each other.

    Attributes:
        calls: factor, at least 1, by which a rank's calls take longer while one of its communications runs.
        exchanges: factor, at least 1, by which its communications take longer while calls run.
    """

    calls: float = 1.0
    exchanges: float = 1.0


NO_SLOWDOWN = Slowdown()


@final
@dataclass(frozen=True)
class Capacity:
    """The limits of a rank's device.

    Attributes:
        name: of the device.
        peaks: FLOP/s by dtype; empty where none are known.
        memory: that it has; None where that is not known.
        reserve: bytes of it that are taken before any tensor: context, allocator, communicators.
        slowdown: of calls and communications beside each other.
        drift: relative standard deviation of the device's speed from step to step.
        launched: true where the host only launches calls, and goes on to the next step meanwhile.
        step: seconds of the host between the acts of one step and those of the next.
    """

    name: str
    peaks: Mapping[str, float] = field(default_factory=dict)
    memory: Bytes | None = None
    reserve: Bytes = NO_BYTES
    slowdown: Slowdown = NO_SLOWDOWN
    drift: float = 0.0
    launched: bool = False
    step: Seconds = NO_TIME


class Costs(Protocol):
    """Seconds on the ranks of a machine. Equal arguments give equal answers."""

    def like(self, rank: int) -> int:
        """A rank with the same device: one for all of a kind."""

    def capacity(self, rank: int) -> Capacity:
        """The limits of a rank's device."""

    def of_call(self, rank: int, call: OpCall, lies: Sequence[str] = ()) -> Cost:
        """One call on a rank; of an op without rule, too.

        Args:
            rank: which.
            call: what it calls.
            lies: how its operands lie that are views, as `weft.hardware.call_text.lying` says; () for not known.
        """

    def of_update(self, rank: int, rule: str, moved: Bytes, together: int = 1) -> Cost:
        """An optimizer's update of one variable.

        Args:
            rank: which.
            rule: of the optimizer.
            moved: bytes that it reads and writes.
            together: how many variables one act updates by this rule, which share what starting takes.
        """

    def of_act(self, rank: int) -> Seconds:
        """Overhead of the host for an act of an actor, beyond its calls."""

    def of_collective(
        self, kind: CollectiveKind, size: Bytes, moved: Bytes, groups: Groups
    ) -> Cost:
        """A collective of all groups at the same time.

        Args:
            kind: what runs.
            size: bytes of the larger side on one rank: the input of all_reduce, reduce_scatter and
                all_to_all, the output of all_gather.
            moved: bytes that one rank sends.
            groups: the ranks of each communicator that runs it.
        """

    def of_transfer(self, sent: Sent, moved: Bytes) -> Cost:
        """A transfer between placements.

        Args:
            sent: what all ranks send to one another.
            moved: bytes that one rank sends or receives, whichever is more.
        """
