"""Worlds: the ranks of this process, their devices, and the communicators between all ranks.

A local world holds all ranks in this process, as threads. Under torchrun every process is one rank
(`weft.runtime.world.distributed`). Without either there is one rank.
"""

from __future__ import annotations

import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from hashlib import sha256
from typing import TypeVar, final

import torch

from weft.errors import LayoutError, RankFailure, UserError, is_number, shown, wrong
from weft.hardware import DefaultDevice
from weft.ir.plan import Communicator
from weft.layout import Placement
from weft.runtime.channels.channel import Channel
from weft.runtime.channels.local import LocalGroup
from weft.runtime.devices.backend import BACKENDS
from weft.runtime.failures.call_log import CallLog
from weft.runtime.failures.failure_store import CallThread, root_failure
from weft.runtime.memory.heap import keep_freed_memory

T = TypeVar("T")

# Seconds after which a rank that waits for its peers gives up.
TIMEOUT = 300.0
# The longest wait that the system's clock accepts: some years.
LONGEST_TIMEOUT = 1e8
# Ranks of one process, which are threads.
MOST_RANKS = 4096

# Channels of the ranks of this process: rank -> communicator id -> channel.
Channels = dict[int, dict[int, Channel]]


class World(ABC):
    """All ranks of a job, as one process sees them.

    Attributes:
        ranks: those that live in this process.
        calls: of this process that all ranks must make alike.
    """

    def __init__(
        self, size: int, ranks: Sequence[int], device_type: str, timeout: float = TIMEOUT
    ) -> None:
        self.size = size
        self.ranks = tuple(ranks)
        self.device_type = device_type
        self.timeout = timeout
        self.calls = CallLog()
        self._process = os.getpid()
        if device_type == "cpu":
            keep_freed_memory()

    @property
    def several(self) -> bool:
        """True if other processes have ranks of the job, too."""
        return len(self.ranks) < self.size

    @property
    def processes(self) -> int:
        """The number of processes of the job, each of as many ranks."""
        return self.size // len(self.ranks)

    def check_process(self) -> None:
        """Check that this is the process that made the world: its threads and connections live there only.

        Raises:
            UserError: in a process that was forked from it.
        """
        if os.getpid() != self._process:
            raise UserError(
                "this process was forked from the one that has the ranks, whose threads did not come along: call "
                "programs there, or start this process with multiprocessing's spawn and make what it needs in it"
            )

    @abstractmethod
    def device(self, rank: int) -> torch.device:
        """The device of a rank of this process."""

    @abstractmethod
    def connect(self, communicators: Sequence[Communicator]) -> Channels:
        """Open communicators, one group for each, in the order given.

        Every process of the job must call this with the same communicators; ranks of this process
        that are not members of one get no channel for it.
        """

    @abstractmethod
    def run(self, function: Callable[[int], T]) -> list[T]:
        """Call `function(rank)` for all ranks of this process at once; results in the order of `ranks`."""

    def check_same(self, texts: Mapping[int, str], what: str) -> None:
        """Check that `what` is the same on all ranks, given the texts of the ranks of this process.

        Raises:
            RankFailure: on all ranks, naming those that differ.
        """
        digests = {rank: sha256(text.encode()).hexdigest() for rank, text in texts.items()}
        found = self.gather(digests)
        usual = max(found, key=found.count)
        different = [rank for rank, digest in enumerate(found) if digest != usual]
        if different:
            raise RankFailure(
                f"{what} must be the same on all ranks, but differs on ranks {different} from that of the others; "
                "check that every rank runs the same script with the same model, strategy and versions"
            )

    @abstractmethod
    def gather(self, texts: Mapping[int, str]) -> list[str]:
        """The texts of all ranks, in their order, given those of the ranks of this process.

        Raises:
            RankFailure: when another process does not, in time.
        """

    def reset_after_failure(self) -> None:  # noqa: B027  # ranks of one process have nothing to forget
        """Go on after a failure that all ranks know of. Every process must call it."""

    @abstractmethod
    def close(self) -> None:
        """End the threads or groups of this world."""

    def links(self) -> DefaultDevice | None:
        """A rank's device with its links as measured; None if the usual figures hold."""
        return None

    def check(self, placement: Placement) -> None:
        """Check that a placement fits this world.

        Raises:
            LayoutError: names the ranks that do not exist, or the device type that differs.
        """
        missing = sorted(rank for rank in placement.ranks if rank >= self.size)
        if missing:
            raise LayoutError(
                f"the placement {placement} names ranks {missing}, but this world has {self.size} "
                f"(0 to {self.size - 1}); start with weft run -n {max(missing) + 1}, or compile inside "
                f"weft.local_world({max(missing) + 1})"
            )
        if placement.device_type != self.device_type:
            raise LayoutError(
                f"the placement {placement} is on {placement.device_type}, but this world runs on {self.device_type}; "
                f"place on {self.device_type!r}, or use a world of {placement.device_type!r}"
            )


def check_devices(device_type: str, index: int = 0) -> None:
    """Check that this process sees the device that it is to use.

    Raises:
        UserError: naming how many CUDA devices there are, or the kinds of devices.
    """
    if not isinstance(device_type, str) or device_type not in BACKENDS:
        known = " or ".join(f'"{name}"' for name in BACKENDS)
        raise UserError(f"a world runs on {known}, got {shown(device_type)}; use one of these")
    count = BACKENDS[device_type].count
    seen = index + 1 if count is None else count()
    if index >= seen:
        raise UserError(
            f"this process is to use {device_type}:{index}, but sees {seen} {device_type.upper()} devices; start fewer "
            f"processes on this host, see to {device_type.upper()}_VISIBLE_DEVICES and to torch built for "
            f'{device_type.upper()}, or place on "cpu"'
        )


@final
class LocalWorld(World):
    """All ranks in this process: rank 0 is the thread that calls `run`, every other one a thread of its own."""

    def __init__(self, size: int, device_type: str = "cpu", timeout: float = TIMEOUT) -> None:
        if not isinstance(size, int) or isinstance(size, bool) or not 1 <= size <= MOST_RANKS:
            raise UserError(
                f"a world has at least one rank, got {shown(size)}; give a whole number from 1 to {MOST_RANKS}"
            )
        if not is_number(timeout) or not 0 < timeout <= LONGEST_TIMEOUT:
            raise wrong("timeout=", f"seconds above 0, at most {LONGEST_TIMEOUT:g}", timeout)
        check_devices(device_type)
        super().__init__(size, range(size), device_type, timeout)
        self._threads = [CallThread(f"weft rank {rank}") for rank in range(1, size)]
        self._closed = False

    def device(self, rank: int) -> torch.device:
        return BACKENDS[self.device_type].device(self.device_type, rank)

    def connect(self, communicators: Sequence[Communicator]) -> Channels:
        channels: Channels = {rank: {} for rank in self.ranks}
        kind = BACKENDS[self.device_type].local_channel
        for communicator in communicators:
            group = LocalGroup(communicator.ranks, self.timeout)
            for index, rank in enumerate(communicator.ranks):
                channels[rank][communicator.id] = kind(group, index, self.device(rank))
        return channels

    def run(self, function: Callable[[int], T]) -> list[T]:
        self.check_process()
        if self._closed:
            raise UserError(
                f"this world of {self.size} ranks is closed: use its programs inside of "
                f"`with weft.local_world({self.size}):`"
            )
        results: dict[int, T] = {}
        errors: list[BaseException] = []

        def call(rank: int) -> None:
            try:
                results[rank] = function(rank)
            except BaseException as error:
                errors.append(error)

        begun = [thread.start(partial(call, rank)) for rank, thread in enumerate(self._threads, 1)]
        call(0)
        for each in begun:
            errors += _wait_for(each.ended)
        if errors:
            raise root_failure(errors)
        return [results[rank] for rank in self.ranks]

    def gather(self, texts: Mapping[int, str]) -> list[str]:
        return [texts[rank] for rank in self.ranks]

    def close(self) -> None:
        for thread in self._threads:
            thread.close()
            thread.join()
        self._threads = []
        self._closed = True


def _wait_for(ended: threading.Event) -> list[BaseException]:
    """Wait until a call has ended; what interrupts the wait comes back, but for a second interrupt."""
    found: list[BaseException] = []
    while True:
        try:
            while not ended.is_set():
                ended.wait()
            return found
        except BaseException as error:
            if found:
                raise
            found.append(error)


# Local worlds that are open, the innermost last.
_open_worlds: list[World] = []


@contextmanager
def local_world(
    size: int, device_type: str = "cpu", timeout: float = TIMEOUT
) -> Iterator[LocalWorld]:
    """Run with `size` ranks in this process, for notebooks, debugging and tests.

    Args:
        device_type: "cpu" or "cuda"; CUDA devices are given out in turn.
    """
    world = LocalWorld(size, device_type, timeout)
    _open_worlds.append(world)
    try:
        yield world
    finally:
        _open_worlds.remove(world)
        world.close()


def innermost_world() -> World | None:
    """The local world that is open, if any."""
    return _open_worlds[-1] if _open_worlds else None
