"""The world of one rank per process, as torchrun starts them, and the world that a program runs in by default."""

from __future__ import annotations

import atexit
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar, final
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import HashStore  # type: ignore[attr-defined]

from weft.errors import UserError
from weft.hardware import Device, usual_device
from weft.ir.plan import Communicator
from weft.runtime.channels.channel import Channel
from weft.runtime.channels.process import GlooChannel, GroupChannel, ProcessChannel
from weft.runtime.channels.shared import SharedChannel
from weft.runtime.channels.shared_link import host
from weft.runtime.devices.backend import BACKENDS
from weft.runtime.failures.awaited import Entries, begin_waits, end_waits
from weft.runtime.failures.board import FailureBoard, PeerFailure
from weft.runtime.failures.calls import CALLS, accounts, looking
from weft.runtime.memory.allocator import keep_freed_memory
from weft.runtime.world.arrival import await_all, connecting, join, say_at_end
from weft.runtime.world.measure_links import measured_links
from weft.runtime.world.meeting import gone
from weft.runtime.world.signed import signed
from weft.runtime.world.variables import timeout_seconds
from weft.runtime.world.world import (
    Channels,
    LocalWorld,
    World,
    check_devices,
    innermost_world,
)

T = TypeVar("T")

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
            join(self._backend.library, self._timeout, gone())
        super().__init__(dist.get_world_size(), (dist.get_rank(),), device_type, timeout)
        store = signed(dist.distributed_c10d._get_default_store())
        self._gone = gone(store)
        await_all(store, self.rank, self.size, self._gone, self._timeout)
        self._entries = Entries(store, self.rank, self._gone, timeout)
        self._board = FailureBoard(store, self.rank, self.size)
        # Communicators so far, of all ranks: they connect in the same order everywhere.
        self._connected = 0
        # What `links` found.
        self._links: Device | None = None
        # Channels that are in use, and the failure that has ended them all; under the lock.
        self._open: WeakSet[ProcessChannel] = WeakSet()
        self._lost: PeerFailure | None = None
        self._lock = threading.Lock()
        # So that the others know where a rank was that ended early.
        atexit.register(self._part)
        try:
            self._everyone = self._meet(shares)
        except BaseException:  # nobody else has it: its thread would work on
            atexit.unregister(self._part)
            self._board.close()
            raise

    def _meet(self, shares: bool) -> Channel:
        """Find out on which hosts the others are, and connect with them."""
        offers = self._backend.shares_memory
        self._hosts = _hosts(self._entries, self.rank, self.size, shares) if offers else ()
        return self._everyone_on_host()

    def _everyone_on_host(self) -> Channel:
        """A new channel between all processes for tensors in host memory."""
        every = Communicator(0, tuple(range(self.size)))
        if self._backend.process_channel.has_room:
            return self.connect((every,))[self.rank][0]
        # What connects devices does not take tensors of the host, and nobody looks around while it waits.
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
        """This rank's end of a communicator; None when it is not in it."""
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
        """This rank's end of a communicator for tensors in host memory."""
        index, host = ranks.index(self.rank), torch.device("cpu")
        made = GlooChannel(group, ranks, index, host, self._board)
        self._noted(made)
        return made

    def _noted(self, found: ProcessChannel) -> ProcessChannel:
        """The same channel, which looks at what other ranks do while it waits, and ends with the world."""
        found.while_waiting = looking(self.calls, self._board, self.rank, found.ranks)
        found.account = accounts(self.calls, self._board, self.rank, found.ranks)
        with self._lock:
            self._open.add(found)
            lost = self._lost
        if lost is not None:  # `give_up` was called before
            found.abort(lost)
        return found

    def _group(self, ranks: list[int], library: str) -> Any:
        with connecting(self.rank, ranks, self._gone):
            return dist.new_group(ranks, timeout=self._timeout, backend=library)

    def give_up(self, why: str) -> None:
        """Have every wait of this process for another one end with an error, as far as that can be; from any thread.

        Args:
            why: the ranks will not go on together.
        """
        error = PeerFailure(f"rank {self.rank} stopped: {why}")
        with self._lock:
            self._lost = self._lost or error
            channels = list(self._open)
        self._board.hear(error)
        for channel in channels:
            channel.abort(error)

    def host_channel(self) -> Channel | None:
        if self.size == 1:
            return None
        found = self._everyone_on_host()
        # It is used beside the calls that all ranks make in one order, and may wait while some are ahead.
        found.while_waiting = _nothing
        found.spins = False
        return found

    @property
    def _across_hosts(self) -> bool:
        """True where ranks that could share memory talk over a network, of which nothing is known."""
        every = range(self.size)
        return self.size > 1 and self._backend.shares_memory and not self._on_one_host(every)

    def _on_one_host(self, ranks: Sequence[int]) -> bool:
        """True where processes can share memory; all ranks of the job answer alike."""
        hosts = {self._hosts[rank] for rank in ranks} if self._hosts else {""}
        return len(hosts) == 1 and hosts != {""}

    def links(self) -> Device | None:
        if self._links is None and self._across_hosts:
            self._links = measured_links(usual_device(self.device_type), self._everyone)
        return self._links

    def run(self, function: Callable[[int], T]) -> list[T]:
        self.check_process()
        return [function(self.rank)]

    def gather(self, texts: Mapping[int, str]) -> list[str]:
        return self._everyone.exchange_text(texts[self.rank])

    def renew(self) -> None:
        self._board.renew()

    def _part(self) -> None:
        self._board.post(str(self.calls.posted()), CALLS)

    def close(self) -> None:
        self.ended = True
        atexit.unregister(self._part)
        self._part()
        self._everyone.close()
        self._board.close()


def _nothing() -> None:
    pass


def shares_memory(environment: Mapping[str, str]) -> bool:
    """True where ranks of one host may share memory.

    Raises:
        UserError: the variable holds something else than its values.
    """
    found = environment.get(TRANSPORT) or _TRANSPORTS[0]
    if found not in _TRANSPORTS:
        raise UserError(f"{TRANSPORT} takes {' or '.join(_TRANSPORTS)}, found {found!r}")
    return found == "shared"


def _hosts(entries: Entries, rank: int, size: int, shares: bool) -> tuple[str, ...]:
    """For every rank, its host; "" where memory is not to be shared."""
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
    """The world that a program runs in.

    That is the local world that is open; else, when torchrun's variables are set or
    `torch.distributed` is initialised, the world of all its processes; else a world of this one
    rank.

    Args:
        device_type: "cpu" or "cuda", for a world that is not there yet.
    """
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


def give_up(why: str) -> None:
    """Have every wait of this process for others end with an error; from any thread.

    Args:
        why: the ranks will not go on together.
    """
    # A world that is being made stands among them later.
    end_waits(PeerFailure(f"this rank stopped: {why}"))
    for world in list(_lasting_worlds.values()):
        if isinstance(world, DistributedWorld):
            world.give_up(why)


def lasting_worlds() -> list[World]:
    """The worlds of this process that are not opened by `local_world`."""
    return list(_lasting_worlds.values())


def end_lasting_worlds() -> None:
    """End the worlds of this process, and its process groups: others are made when they are asked for."""
    while _lasting_worlds:
        _, world = _lasting_worlds.popitem()
        with suppress(Exception):  # of a store, or a rank, that has gone
            world.close()
    if not dist.is_initialized():
        # One that failed on the way has taken a name, which torch gives by a count: the next one would have another
        # than that of a process that has made none, and they would wait for each other's entries in vain. Torch
        # counts anew after a group was destroyed.
        dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()
    begin_waits()


say_at_end()
