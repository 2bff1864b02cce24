"""The processes of a job come together: who waits for the others finds out which one has ended before it came.

A process says in the job's store that it has come. That it lives, and is still to come, the others see
by a lock on a file beside the one in which the ranks of a host meet, which the system lets go with the
process, however it ends; or under torchrun, which ends all processes when one fails, by what one that
ends well says in the store.
"""

from __future__ import annotations

import atexit
import fcntl
import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch.distributed as dist
from torch.distributed import PrefixStore, rendezvous  # type: ignore[attr-defined]

from weft.errors import NoAnswer, UserError
from weft.runtime.failures.awaited import Entries
from weft.runtime.failures.board import first_line
from weft.runtime.world.nodes.joined import ended_key
from weft.runtime.world.signed import signed
from weft.runtime.world.variables import started

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


def hold_sign(path: str, rank: int) -> None:
    """Lock the file by which others see that this rank lives."""
    sign = Path(f"{path}.rank{rank}")
    made = sign.with_name(f"{sign.name}.{os.getpid()}")
    _held.append(made.open("w"))
    fcntl.lockf(_held[-1], fcntl.LOCK_EX)
    made.rename(sign)  # is there only when it is locked


def let_signs_go() -> None:
    """Let go the locks of this process, which goes on as another rank or among others."""
    while _held:
        _held.pop().close()


def sign_is_gone(path: str, rank: int) -> bool:
    """True where a rank held its sign, and has ended; False before it has begun."""
    try:
        with Path(f"{path}.rank{rank}").open("r+") as sign:
            fcntl.lockf(sign, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # none yet, or held
        return False
    return True


def await_all(
    store: Any, rank: int, size: int, gone: Callable[[int], bool], timeout: timedelta
) -> None:
    """Wait until all processes have come.

    Args:
        size: how many there are.
        gone: whether another rank has ended.

    Raises:
        NoAnswer: names the rank that has ended before it came, or did not come in time.
        RankFailure: the ranks do not go on together.
    """
    entries = Entries(store, rank, gone, timeout.total_seconds())
    entries.write(_came(rank), "")
    entries.wait({other: _came(other) for other in range(size) if other != rank}, _HERE)


@contextmanager
def connecting(rank: int, ranks: Sequence[int], gone: Callable[[int], bool]) -> Iterator[None]:
    """Say of an error of torch's, while ranks make a process group, which of them has ended, as far as can be told.

    Args:
        gone: whether another rank has ended.

    Raises:
        NoAnswer: one of them has ended, or did not answer in time.
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
        ended = [other for other in others if gone(other)]
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


def said_to_be_gone(store: Any) -> Callable[[int], bool]:
    """A function that tells by the store whether a rank has ended, as `say_at_end` writes there."""
    return lambda rank: bool(store.check([ended_key(rank, started())]))


def under_torchrun() -> bool:
    """True where torchrun has started this process, and keeps the store, so that no rank need be there to reach it."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" and "RANK" in os.environ


def join(backend: str, timeout: timedelta, gone: Callable[[int], bool]) -> None:
    """Call `torch.distributed.init_process_group`, under torchrun when all processes have come.

    Args:
        backend, timeout: as it takes them.
        gone: whether another rank has ended.

    Raises:
        NoAnswer: as `await_all`; or one has ended, or did not answer, later.
    """
    rank, size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    with connecting(rank, range(size), gone):
        _join(backend, timeout)


def _join(backend: str, timeout: timedelta) -> None:
    if not under_torchrun():
        dist.init_process_group(backend, timeout=timeout)
        return
    found, rank, size = next(iter(rendezvous("env://", timeout=timeout)))
    store = PrefixStore(_PREFIX, found)
    own = signed(store)
    await_all(own, rank, size, said_to_be_gone(own), timeout)
    dist.init_process_group(backend, timeout=timeout, store=store, rank=rank, world_size=size)


def say_at_end() -> None:
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
        signed(store).set(ended_key(rank, started()), "")
