"""The world of one rank per process, as torchrun starts them, and the world that a program runs in by default."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from time import perf_counter
from typing import Any, TypeVar, final

import torch
import torch.distributed as dist

from weft.errors import wrong
from weft.hardware import DefaultDevice, default_device, linked
from weft.ir.plan import Communicator
from weft.runtime.channels.channel import Channel
from weft.runtime.channels.process import GlooChannel, GroupChannel, ProcessChannel
from weft.runtime.channels.shared import SharedChannel
from weft.runtime.channels.shared_link import host
from weft.runtime.devices.backend import BACKENDS
from weft.runtime.failures.call_log import looking, posted_calls_text
from weft.runtime.failures.failure_store import FailureStore, StoreEntries
from weft.runtime.memory.heap import keep_freed_memory
from weft.runtime.world.launch import timeout_seconds
from weft.runtime.world.rendezvous import (
    await_all,
    connecting,
    departed,
    join,
    report_exit_at_end,
)
from weft.runtime.world.world import (
    Channels,
    LocalWorld,
    World,
    check_devices,
    innermost_world,
)
from weft.units import Seconds

T = TypeVar("T")

# Bytes of a large exchange that measures links: some milliseconds on a slow link.
_LARGE = 2**20
# The fastest of so many counts: whatever else happens only makes them slower.
_TIMES = {1: 8, _LARGE: 3}

# "shared" (the default), or "gloo": ranks of one host do not share memory either.
TRANSPORT = "WEFT_TRANSPORT"
_TRANSPORTS = ("shared", "gloo")


@final
class DistributedWorld(World):
    """This process is one rank of a job that torchrun, or anything else that sets its variables, has started.

    `torch.distributed` is initialised unless it is already.
    """

    def __init__(self, device_type: str = "cpu", timeout: float | None = None) -> None:
        timeout = timeout_seconds() if timeout is None else timeout
        self._timeout = timedelta(seconds=timeout)
        self._backend = BACKENDS[device_type]
        self._device = _device(device_type)
        shares = shares_memory(os.environ)
        if device_type == "cpu":
            keep_freed_memory()  # before there are threads, which keep the heaps that they have
        if not dist.is_initialized():
            join(self._backend.library, self._timeout, departed())
        super().__init__(dist.get_world_size(), (dist.get_rank(),), device_type, timeout)
        store = dist.distributed_c10d._get_default_store()
        self._gone = departed(store)
        await_all(store, self.rank, self.size, self._gone, self._timeout)
        self._entries = StoreEntries(store, self.rank, self._gone, timeout)
        self._board = FailureStore(store, self.rank, self.size)
        # Communicators so far, of all ranks: they connect in the same order everywhere.
        self._connected = 0
        # The result of `links`.
        self._links: DefaultDevice | None = None
        # So that the others know where a rank was that ended early.
        atexit.register(self._part)
        try:
            self._everyone = self._rendezvous(shares)
        except BaseException:  # nobody else has it: its thread would work on
            atexit.unregister(self._part)
            self._board.close()
            raise

    def _rendezvous(self, shares: bool) -> Channel:
        """Find out on which hosts the others are; a channel between all processes for tensors in host memory."""
        offers = self._backend.shares_memory
        self._hosts = _hosts(self._entries, self.rank, self.size, shares) if offers else ()
        every = Communicator(0, tuple(range(self.size)))
        if self._backend.process_channel.has_room:
            return self.connect((every,))[self.rank][0]
        # Device communicators take no host tensors, and no watchdog looks around while they wait.
        return self._beside(every.ranks, self._group(list(every.ranks), "gloo"))

    @property
    def rank(self) -> int:
        """The rank of this process."""
        return self.ranks[0]

    def device(self, rank: int) -> torch.device:
        return self._device

    def connect(self, communicators: Sequence[Communicator]) -> Channels:
        channels: dict[int, Channel] = {}
        for communicator in communicators:
            self._connected += 1
            channel = self._channel_of(communicator)
            if channel is not None:
                channels[communicator.id] = channel
        return {self.rank: channels}

    def _channel_of(self, communicator: Communicator) -> Channel | None:
        ranks, own = communicator.ranks, self.rank in communicator.ranks
        shared, kind = self._on_one_host(ranks), self._backend.process_channel
        # All processes must make the groups.
        libraries = [] if shared else [self._backend.library] + ["gloo"] * (not kind.has_room)
        groups = [self._group(sorted(ranks), library) for library in libraries]
        if not own:
            return None
        index, timeout = ranks.index(self.rank), self._timeout.total_seconds()
        found: ProcessChannel = (
            SharedChannel(self._entries, self._connected, ranks, index, self._board, timeout)
            if shared
            else kind(groups[0], ranks, index, self._device, self._board)
        )
        if isinstance(found, GroupChannel) and not kind.has_room:
            found.beside = self._beside(ranks, groups[1])
        return self._noted(found)

    def _beside(self, ranks: Sequence[int], group: Any) -> GlooChannel:
        index, host = ranks.index(self.rank), torch.device("cpu")
        made = GlooChannel(group, ranks, index, host, self._board)
        self._noted(made)
        return made

    def _noted(self, found: ProcessChannel) -> ProcessChannel:
        found.while_waiting = looking(self.calls, self._board, self.rank, found.ranks)
        found.account = posted_calls_text(self.calls, self._board, self.rank, found.ranks)
        return found

    def _group(self, ranks: list[int], library: str) -> Any:
        with connecting(self.rank, ranks, self._gone):
            return dist.new_group(ranks, timeout=self._timeout, backend=library)

    def _on_one_host(self, ranks: Sequence[int]) -> bool:
        """True if processes can share memory; all ranks of the job answer alike."""
        hosts = {self._hosts[rank] for rank in ranks} if self._hosts else {""}
        return len(hosts) == 1 and hosts != {""}

    def links(self) -> DefaultDevice | None:
        # Ranks that could share memory, and talk over a network, of which nothing is known.
        shares, every = self._backend.shares_memory, range(self.size)
        if self._links is None and self.size > 1 and shares and not self._on_one_host(every):
            self._links = measured_links(default_device(self.device_type), self._everyone)
        return self._links

    def run(self, function: Callable[[int], T]) -> list[T]:
        self.check_process()
        return [function(self.rank)]

    def gather(self, texts: Mapping[int, str]) -> list[str]:
        return self._everyone.exchange_text(texts[self.rank])

    def reset_after_failure(self) -> None:
        self._board.renew()

    def _part(self) -> None:
        self._board.post(str(self.calls.posted()))

    def close(self) -> None:
        atexit.unregister(self._part)
        self._part()
        self._everyone.close()
        self._board.close()


def measured_links(device: DefaultDevice, channel: Channel) -> DefaultDevice:
    """A device with the measured links of a channel, the same on all its ranks.

    Every rank sends to the next one and receives from the one before, all at once. The slowest
    counts.
    """
    own = " ".join(str(_exchange_seconds(channel, size)) for size in _TIMES)
    every = [tuple(map(float, text.split())) for text in channel.exchange_text(own)]
    small, large = (max(each) for each in zip(*every, strict=True))
    return linked(device, _LARGE / max(large - small, 1e-9), Seconds(small))


def _exchange_seconds(channel: Channel, size: int) -> float:
    """Seconds to send so many bytes to the next rank and receive as many from the one before; the fastest of some
    tries.
    """
    after, before = (channel.index + 1) % channel.size, (channel.index - 1) % channel.size
    own, came = torch.zeros(2, size, dtype=torch.uint8, device=channel.device)
    sends = [[own] if peer == after else [] for peer in range(channel.size)]
    receives = [[came] if peer == before else [] for peer in range(channel.size)]
    found = []
    # The first connects.
    for _ in range(_TIMES[size] + 1):
        begun = perf_counter()
        channel.exchange(sends, receives)
        found.append(perf_counter() - begun)
    return min(found[1:])


def shares_memory(environment: Mapping[str, str]) -> bool:
    """True if ranks of one host may share memory.

    Raises:
        UserError: the variable holds something else than its values.
    """
    found = environment.get(TRANSPORT) or _TRANSPORTS[0]
    if found not in _TRANSPORTS:
        raise wrong(TRANSPORT, " or ".join(_TRANSPORTS), found)
    return found == "shared"


def _hosts(entries: StoreEntries, rank: int, size: int, shares: bool) -> tuple[str, ...]:
    """For every rank, its host; "" if memory is not to be shared."""
    own = host() if shares else ""
    entries.write(f"weft/host/{rank}", own)
    there = "the others, as each says on which host it is"
    return tuple(entries.read(f"weft/host/{other}", other, there) for other in range(size))


def _device(device_type: str) -> torch.device:
    index = int(os.environ.get("LOCAL_RANK", "0"))
    check_devices(device_type, index)
    device = BACKENDS[device_type].device(device_type, index)
    BACKENDS[device_type].choose(device)
    return device


# Worlds of this process that are not local ones, by device type; they last as long as the process.
_lasting_worlds: dict[str, World] = {}


def current_world(device_type: str = "cpu") -> World:
    """The world that a program runs in."""
    local = innermost_world()
    if local is not None:
        return local
    check_devices(device_type)
    if device_type not in _lasting_worlds:
        started = dist.is_initialized() or {"RANK", "WORLD_SIZE"} <= os.environ.keys()
        _lasting_worlds[device_type] = (
            DistributedWorld(device_type) if started else LocalWorld(1, device_type)
        )
    return _lasting_worlds[device_type]


report_exit_at_end()
