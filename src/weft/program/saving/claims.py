"""Claims on folders of checkpoints: two programs that save to one would replace each other's, be it in two jobs."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from time import monotonic, sleep
from typing import Protocol, TextIO
from weakref import WeakValueDictionary, finalize

from weft.errors import UserError
from weft.units import Seconds

# In a folder of checkpoints: the job that saves there has it open, and locked, and names itself in it.
LOCK = ".lock"
# For so long the lock of a process is waited for that may be about to end, as a rank does that others go on without.
PATIENCE, _AGAIN = Seconds(3.0), 0.1
# Said by the system where another process has the lock.
_TAKEN = (errno.EACCES, errno.EAGAIN)


class Claimant(Protocol):
    """A program that saves."""

    @property
    def is_open(self) -> bool:
        """True until it is closed."""

    @property
    def is_first(self) -> bool:
        """True in the process that writes for all."""

    @property
    def exchange(self) -> Callable[[str], list[str]] | None:
        """Gives the texts of all processes; None where this is the only one."""


_claims: WeakValueDictionary[Path, Claimant] = WeakValueDictionary()
# Of those, the programs whose jobs were asked, and have a folder for themselves.
_alone: WeakValueDictionary[Path, Claimant] = WeakValueDictionary()
# Let go of once the program that claimed last has ended; a forked process has none of them.
_locks: dict[Path, TextIO] = {}


def claim(folder: Path, program: Claimant) -> None:
    """Note that a program saves to a folder of checkpoints, or takes the snapshots that belong to it.

    Raises:
        UserError: another open program of this process does.
    """
    folder = folder.resolve()
    other = _claims.get(folder)
    if other is not None and other is not program and other.is_open:
        raise UserError(
            f"another open program saves to {folder}, and each would take the checkpoints of the other for its own; "
            "give each program a folder, or close the other one before"
        )
    _claims[folder] = program


def claim_for_job(folder: Path, program: Claimant) -> None:
    """Claim a folder, and lock it for this job until the program is closed. Every process must call it.

    A file system that knows no locks is taken as it is.

    Raises:
        UserError: on every process, when a program of another job saves there; and as `claim` does.
    """
    claim(folder, program)
    folder = folder.resolve()
    if _alone.get(folder) is program or not program.is_open:
        return
    holder = _lock(folder) if program.is_first else ""
    if program.exchange is not None:
        holder = program.exchange(holder)[0]
    if holder:
        del _claims[folder]
        raise UserError(
            f"{holder} saves to {folder}, and each job would take the checkpoints of the other for its own; give each "
            "job a folder, or end the other one before"
        )
    _alone[folder] = program
    finalize(program, _unlock_unclaimed, folder)


def give_up(program: Claimant) -> None:
    """Let go of what a program has claimed."""
    for folder in [each for each, by in _claims.items() if by is program]:
        del _claims[folder]
        _alone.pop(folder, None)
        _unlock(folder)


def is_of_another_job(folder: Path) -> bool:
    """True where another job saves to a folder, as far as its file system tells."""
    folder = folder.resolve()
    if folder in _locks:
        return False
    with suppress(OSError), (folder / LOCK).open("r+") as lock:
        return not _take(lock, Seconds(0.0))
    return False


def _lock(folder: Path) -> str:
    """Lock a folder; empty, or who has locked it. A folder that cannot be written to is for others to tell."""
    if folder in _locks:
        return ""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", errors="replace")
    except OSError:
        return ""
    if not _take(lock, PATIENCE):
        with lock:
            lock.seek(0)
            return lock.read(200) or "another job"
    _locks[folder] = lock
    try:
        lock.truncate(0)
        lock.write(f"process {os.getpid()} of host {socket.gethostname()}")
        lock.flush()
    except OSError:  # a full disk; the checkpoint will say so
        pass
    return ""


def _take(lock: TextIO, patience: Seconds) -> bool:
    """Take the lock of an open file; False where another process has it for so long. True where there are no locks."""
    until = monotonic() + patience
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _TAKEN:
                return True
            if monotonic() >= until:
                return False
            sleep(_AGAIN)
        else:
            return True


def _close_all() -> None:
    for each in _locks.values():
        each.close()
    _locks.clear()


def _unlock_unclaimed(folder: Path) -> None:
    if folder not in _claims:
        _unlock(folder)


def _unlock(folder: Path) -> None:
    if folder in _locks:
        _locks.pop(folder).close()


os.register_at_fork(after_in_child=_close_all)
