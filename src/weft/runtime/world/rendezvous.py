"""The rendezvous of a job's ranks: where they meet, and which rank ended before it came.

They meet in a file in a folder that nobody else can reach, or in the store of several nodes: torch's own store listens
on all interfaces of the host and believes whoever connects.

A process says in the job's store that it has come. The others see that a rank still lives, and will come, by a lock
on a file beside the one in which the ranks of a host meet, which the system lets go with the process, however it
ends; or under torchrun, which ends all processes when one fails, by what one that ends well says in the store.
"""

from __future__ import annotations

import atexit
import fcntl
import importlib
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache, partial
from itertools import count
from pathlib import Path
from typing import Any, TextIO
from urllib.parse import parse_qsl, urlsplit

import torch.distributed as dist
from torch.distributed import (  # type: ignore[attr-defined]
    FileStore,
    PrefixStore,
    Store,
    rendezvous,
)
from torch.distributed.constants import default_pg_timeout

from weft.errors import NoAnswer, UserError
from weft.private import check_private
from weft.runtime.failures.failure_store import StoreEntries, first_line
from weft.runtime.world.launch import MEETING, STORE, given_secret, started, timeout_seconds
from weft.runtime.world.launchers import ended_key
from weft.runtime.world.store import NodesStore

_HERE = "weft.compile, or whatever else needs all ranks; every process must come there"
# Words of torch's errors where a process has not come to the others, or has ended, while they make a group.
_ALONE = ("wait timeout", "timeout waiting", "timed out", "connectfullmesh failed", "by peer")
# Of Gloo's message about a network interface that is down, or not there.
_NO_ADDRESS = "Unable to find address for: "
# Seconds in which a process that ends reaches torchrun's store.
_REACH = timedelta(seconds=5)
# The process that torchrun has started, so that those that it starts do not speak for it.
_PROCESS = "WEFT_RANK_PROCESS"
# Where torch itself keeps what `init_process_group` stores.
_PREFIX = "default_pg"

# Locked files stay open as long as this process lives.
_held: list[TextIO] = []


def private_rendezvous() -> None:
    """Let `init_process_group` meet where the launcher says, if it does and the call names no other place.

    The rule applies to torch's `init_method="env://"`, its default, without MASTER_ADDR and MASTER_PORT. A rank that
    ends before it comes there is named to the others.
    """
    if MEETING in os.environ:
        hold_alive_lock(os.environ[MEETING], int(os.environ["RANK"]))
    elif STORE not in os.environ:
        return
    # A group that is made after another one was destroyed must not find what that one left.
    times = count()

    def meet(
        url: str, timeout: timedelta = default_pg_timeout, **_: Any
    ) -> Iterator[tuple[Store, int, int]]:
        given = dict(parse_qsl(urlsplit(url).query))
        rank, size = (int(given.get(n.lower(), os.environ[n])) for n in ("RANK", "WORLD_SIZE"))
        store = _place(next(times))
        seconds = timedelta(seconds=timeout_seconds())
        await_all(
            store,
            rank,
            size,
            departed(),
            seconds if timeout == default_pg_timeout else timeout,
        )
        yield store, rank, size

    importlib.import_module("torch.distributed.rendezvous")._rendezvous_handlers["env"] = meet


def _place(time: int) -> Store:
    path = os.environ.get(MEETING)
    if path is None:
        # The store outlives the ranks of one start.
        return PrefixStore(f"start{started()}/group{time}", _nodes_store())
    check_private(Path(path).parent, "set TMPDIR to a folder where nobody else may write")
    return FileStore(f"{path}.{time}")


@cache
def _nodes_store() -> NodesStore:
    return NodesStore(os.environ[STORE], given_secret(), timeout_seconds())


def departed(store: Store | None = None) -> Callable[[int], bool]:
    """A function that tells whether a rank of the job has ended.

    Args:
        store: of the job, where no launcher of weft's has started it; None if it is not there yet, and nothing
            can be told.
    """
    if MEETING in os.environ:
        return partial(alive_lock_is_free, os.environ[MEETING])
    found = _nodes_store() if STORE in os.environ else store
    return (lambda _: False) if found is None else reported_departed(found)


def hold_alive_lock(path: str, rank: int) -> None:
    """Lock the file by which others see that this rank lives."""
    sign = Path(f"{path}.rank{rank}")
    made = sign.with_name(f"{sign.name}.{os.getpid()}")
    _held.append(made.open("w"))
    fcntl.lockf(_held[-1], fcntl.LOCK_EX)
    made.rename(sign)  # is there only when it is locked


def alive_lock_is_free(path: str, rank: int) -> bool:
    """True if a rank held its sign, and has ended; False before it has begun."""
    try:
        with Path(f"{path}.rank{rank}").open("r+") as sign:
            fcntl.lockf(sign, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # none yet, or held
        return False
    return True


def await_all(
    store: Any, rank: int, size: int, departed: Callable[[int], bool], timeout: timedelta
) -> None:
    """Wait until all processes have come.

    Args:
        departed: true of another rank that has ended.

    Raises:
        RankFailure: the ranks do not continue together.
    """
    entries = StoreEntries(store, rank, departed, timeout.total_seconds())
    entries.write(_came(rank), "")
    entries.wait({other: _came(other) for other in range(size) if other != rank}, _HERE)


@contextmanager
def connecting(rank: int, ranks: Sequence[int], departed: Callable[[int], bool]) -> Iterator[None]:
    """Say of an error of torch's, while ranks make a process group, which of them has ended, as far as can be told.

    Raises:
        UserError: naming a network interface without an address.
    """
    try:
        yield
    except RuntimeError as error:
        _, asked, interface = str(error).partition(_NO_ADDRESS)
        if asked:
            name = interface.split()[0]
            raise UserError(
                f"rank {rank}: Gloo finds no address of the network interface {name}, which is down or not there: "
                f"bring it up (ip link set {name} up), or name another one in GLOO_SOCKET_IFNAME"
            ) from error
        others = [other for other in ranks if other != rank]
        if not others or not any(words in str(error).lower() for words in _ALONE):
            raise
        ended = [other for other in others if departed(other)]
        who = (
            f"rank {ended[0]} has ended"
            if ended
            else f"one of {others} has ended or did not answer"
        )
        raise NoAnswer(
            f"rank {rank} did not connect with ranks {others}: {who}: {first_line(error)}"
        ) from error


def _came(rank: int) -> str:
    return f"weft/came/{rank}"


def reported_departed(store: Any) -> Callable[[int], bool]:
    """A function that tells by the store whether a rank has ended, as `report_exit_at_end` writes there."""
    return lambda rank: bool(store.check([ended_key(rank, started())]))


def under_torchrun() -> bool:
    """True if torchrun has started this process, and keeps the store, so that no rank need be there to reach it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "RANK" in os.environ


def join(backend: str, timeout: timedelta, departed: Callable[[int], bool]) -> None:
    """Call `torch.distributed.init_process_group`, under torchrun when all processes have come."""
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with connecting(rank, range(size), departed):
        if not under_torchrun():
            dist.init_process_group(backend, timeout=timeout)
            return
        found, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
        store = PrefixStore(_PREFIX, found)
        await_all(store, rank, size, reported_departed(store), timeout)
        dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)


def report_exit_at_end() -> None:
    """Under torchrun, have this process say that it has ended, unless it has come to the others by then."""
    if under_torchrun() and multiprocessing.parent_process() is None:
        own = str(os.getpid())
        if os.environ.setdefault(_PROCESS, own) == own:
            atexit.register(_say_end, os.getpid())


def _say_end(process: int) -> None:
    if process != os.getpid():  # forked
        return
    with suppress(Exception):  # the store is gone, and with it all who would read
        if dist.is_initialized():
            store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank()
        else:
            found, rank, _ = next(iter(rendezvous("env://", timeout=_REACH)))
            store = PrefixStore(_PREFIX, found)
        store.set(ended_key(rank, started()), "")
