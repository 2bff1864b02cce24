"""The streams of a rank's queues, as `DeviceExecutor` uses them; here those of a device that has none."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from time import perf_counter_ns
from typing import TypeAlias, final

import torch
from torch import Tensor

# A register, and the number of a version among those of the step.
Key: TypeAlias = "tuple[str, int]"


@final
@dataclass(frozen=True)
class Read:
    """A version that an act takes: whether no later act does, and whether another queue made it."""

    key: Key
    last: bool
    foreign: bool


@final
@dataclass(frozen=True)
class Launch:
    """One act of a step.

    Attributes:
        queue: whose stream it goes to; feeding and fetching move nothing, so they go to compute's.
        reads: tensors that it takes, as `Work.reads` lists them.
        writes: for each of `Work.writes`, the version that is complete then; None in the middle of
            one, or where nobody reads it.
        waits: places of acts of other queues that must have ended; none that its queue has waited
            for already.
    """

    place: int
    actor: int
    micro: int
    queue: str
    reads: tuple[Read, ...]
    writes: tuple[Key | None, ...]
    waits: tuple[int, ...]


class Streams(ABC):
    """The streams of a rank, and the waits between them. One thread calls it."""

    @abstractmethod
    def begin(self) -> None:
        """A step begins: its work comes after what the caller has put on the current stream.

        Waits for the step before the last one, so that the host is at most a step ahead.

        Raises:
            RankFailure: when that step does not end in time.
        """

    @abstractmethod
    def enter(self, launch: Launch) -> None:
        """Send work to the stream of an act's queue, after everything that the act waits for."""

    @abstractmethod
    def read(self, tensor: Tensor) -> None:
        """The act reads memory of another stream: it must not be reused before that has happened."""

    @abstractmethod
    def leave(self, launch: Launch) -> None:
        """All work of the act has been put on its stream."""

    @abstractmethod
    def end(self, results: Iterable[Tensor]) -> None:
        """A step ends: what the caller does next on the current stream comes after all its work."""

    @abstractmethod
    def wait(self) -> None:
        """Wait on the host until all work of the last step has ended."""

    @abstractmethod
    def stop(self) -> None:
        """A step has failed: go back to the stream of the caller."""

    @abstractmethod
    def times(self) -> Sequence[tuple[int, int]]:
        """The begin and end of each act of the last step, in nanoseconds of `perf_counter_ns`; waits for its end."""


@final
class Inline(Streams):
    """Everything runs at once, where it is called; the arguments are those of any `MakeStreams`."""

    def __init__(
        self,
        device: torch.device,
        launches: Sequence[Launch],
        timeout: float,
        unfinished: Callable[[int], str],
    ) -> None:
        self._begun = [0] * len(launches)
        self._ended = [0] * len(launches)

    def begin(self) -> None:
        """Nothing continues from step to step."""

    def enter(self, launch: Launch) -> None:
        self._begun[launch.place] = perf_counter_ns()

    def read(self, tensor: Tensor) -> None:
        """There is one stream."""

    def leave(self, launch: Launch) -> None:
        self._ended[launch.place] = perf_counter_ns()

    def end(self, results: Iterable[Tensor]) -> None:
        """All has ended."""

    def wait(self) -> None:
        """All has ended."""

    def stop(self) -> None:
        """The stream is the caller's."""

    def times(self) -> Sequence[tuple[int, int]]:
        return list(zip(self._begun, self._ended, strict=True))


# Makes the streams of a rank, given its device, its acts, the time-out, and names of acts by place.
MakeStreams: TypeAlias = Callable[
    [torch.device, Sequence[Launch], float, Callable[[int], str]], Streams
]
