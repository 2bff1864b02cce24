"""Backends as data: the runtime's facts about each device type, one table row per type.

Facts that plans need of a device type are in `weft.hardware.costs`. Which kernel of torch suits a device is
decided where kernels are chosen.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import perf_counter_ns
from typing import Any, TypeAlias, final

import torch
from torch import Tensor

from weft.errors import NoAnswer
from weft.ir.plan import COMPUTE
from weft.runtime.channels.channel import Channel
from weft.runtime.channels.local import LocalChannel
from weft.runtime.channels.process import GlooChannel, GroupChannel, NcclChannel
from weft.runtime.devices.cuda_graphs import CudaGraphCapture, GraphCapture

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
        waits: places of acts of other queues that must have ended; none that its queue has waited for already.
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


# Makes the streams of a rank, given its device, its acts, the time-out, and names of acts by place.
MakeStreams: TypeAlias = Callable[
    [torch.device, Sequence[Launch], float, Callable[[int], str]], Streams
]


# torch does not type them.
_event: Any = torch.cuda.Event
_stream: Any = torch.cuda.Stream

# Seconds between two looks at a step that is not done; the device has another one to continue with.
_PATIENCE = 1e-4


class CudaStreams(Streams):
    """Compute is the stream of the caller; every other queue has one of its own."""

    def __init__(
        self,
        device: torch.device,
        launches: Sequence[Launch],
        timeout: float,
        unfinished: Callable[[int], str],
    ) -> None:
        self._device = device
        self._timeout = timeout
        self._unfinished = unfinished
        others = dict.fromkeys(each.queue for each in launches if each.queue != COMPUTE)
        self._streams = {queue: _stream(device) for queue in others}
        self._caller = torch.cuda.current_stream(device)
        # The last act of each of them: all others of its stream end before it.
        self._last = {each.queue: each.place for each in launches if each.queue != COMPUTE}
        # Of this step and the one before, in turn.
        self._now, self._before = _Marks(len(launches)), _Marks(len(launches))

    def begin(self) -> None:
        torch.cuda.set_device(self._device)
        last, self._now, self._before = self._now, self._before, self._now
        self._await(self._now)
        self._caller = torch.cuda.current_stream(self._device)
        # The caller may have changed streams since the last step.
        self._caller.wait_event(last.all)
        self._now.start.record(self._caller)
        for stream in self._streams.values():
            stream.wait_event(self._now.start)

    def enter(self, launch: Launch) -> None:
        stream = self._streams.get(launch.queue, self._caller)
        torch.cuda.set_stream(stream)
        for place in launch.waits:
            stream.wait_event(self._now.ended[place])
        self._now.begun[launch.place].record(stream)

    def read(self, tensor: Tensor) -> None:
        if tensor.is_cuda:
            tensor.record_stream(torch.cuda.current_stream(self._device))

    def leave(self, launch: Launch) -> None:
        self._now.ended[launch.place].record(self._streams.get(launch.queue, self._caller))

    def end(self, results: Iterable[Tensor]) -> None:
        torch.cuda.set_stream(self._caller)
        for place in self._last.values():
            self._caller.wait_event(self._now.ended[place])
        for result in results:
            if result.is_cuda:
                result.record_stream(self._caller)
        self._now.all.record(self._caller)

    def wait(self) -> None:
        self._await(self._now)

    def stop(self) -> None:
        torch.cuda.set_stream(self._caller)

    def times(self) -> Sequence[tuple[int, int]]:
        self.wait()
        now = _event(enable_timing=True)
        now.record(self._caller)
        now.synchronize()
        clock = perf_counter_ns()

        def moment(event: Any) -> int:
            return clock - round(float(event.elapsed_time(now)) * 1e6)

        return [
            (moment(begun), moment(ended))
            for begun, ended in zip(self._now.begun, self._now.ended, strict=True)
        ]

    def _await(self, marks: _Marks) -> None:
        """Wait on the host for a step, as long as the device continues."""
        pending = marks.pending()
        deadline = time.monotonic() + self._timeout
        while not marks.all.query():
            time.sleep(_PATIENCE)
            if time.monotonic() < deadline:
                continue
            if marks.pending() == pending:
                raise NoAnswer(self._stall_report(pending))
            pending, deadline = marks.pending(), time.monotonic() + self._timeout

    def _stall_report(self, pending: Sequence[int]) -> str:
        what = (
            f"; the first that has not ended is {self._unfinished(pending[0])}" if pending else ""
        )
        return f"{self._device} has finished no act for {self._timeout:g} s{what}"


@final
class _Marks:
    """The events of one step. An event that was never recorded counts as done."""

    def __init__(self, count: int) -> None:
        self.start = _event()
        self.begun = [_event(enable_timing=True) for _ in range(count)]
        self.ended = [_event(enable_timing=True) for _ in range(count)]
        self.all = _event()

    def pending(self) -> tuple[int, ...]:
        """The acts that have not ended."""
        return tuple(place for place, event in enumerate(self.ended) if not event.query())


# Communicators between ranks that are threads of one process and compute on CUDA devices.
#
# A rank reads its peers' tensors on its own stream, once the work that makes them is done; they may
# be overwritten or freed once all have read them. Threads meet on the host, devices by events.


class CudaLocalChannel(LocalChannel):
    """One rank's end of a `LocalGroup` on a CUDA device."""

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        self._await_all(f"{self.running} begins")
        super()._exchange(sends, receives)
        self._await_all(f"{self.running} ends")

    def _all_reduce(self, tensors: Sequence[Tensor], reduction: str) -> None:
        # By exchanges: only these make the devices wait for each other.
        Channel._all_reduce(self, tensors, reduction)

    def _reduce_parts(self, pieces: Sequence[Sequence[Tensor]], reduction: str) -> None:
        Channel._reduce_parts(self, pieces, reduction)

    def _await_all(self, kind: str) -> None:
        """Let the stream of this rank wait until all ranks have done the work that is on theirs by now."""
        event: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        for other in self._group.put(self.index, kind, event):
            # A copy between devices runs on the stream of the one that it reads from.
            for device in (self.device, other.device):
                torch.cuda.current_stream(device).wait_event(other)
        self._group.leave(self.index, kind)


@final
@dataclass(frozen=True)
class Backend:
    """The functions with which ranks of one device type compute and communicate.

    Attributes:
        shares_memory: whether processes of one host may exchange through its memory.
        count: how many devices this process sees; None if all ranks of a host are on one.
        choose: makes a device the current one of this process.
    """

    library: str
    process_channel: type[GroupChannel]
    local_channel: type[LocalChannel]
    shares_memory: bool = False
    count: Callable[[], int] | None = None
    streams: MakeStreams | None = None
    tape: Callable[[torch.device], GraphCapture] | None = None
    current: Callable[[torch.device], AbstractContextManager[object]] = nullcontext
    choose: Callable[[torch.device], None] = lambda _: None

    def device(self, name: str, index: int) -> torch.device:
        """The device of rank `index` of a host; where there are fewer, they are given out in turn."""
        return (
            torch.device(name) if self.count is None else torch.device(name, index % self.count())
        )


BACKENDS = {
    "cpu": Backend("gloo", GlooChannel, LocalChannel, shares_memory=True),
    "cuda": Backend(
        "nccl",
        NcclChannel,
        CudaLocalChannel,
        count=lambda: torch.cuda.device_count(),
        streams=CudaStreams,
        tape=CudaGraphCapture,
        current=torch.cuda.device,
        choose=lambda device: torch.cuda.set_device(device),
    ),
}


def backend_of(device: torch.device) -> Backend:
    """The backend of ranks on a device."""
    return BACKENDS[device.type]
