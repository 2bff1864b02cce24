"""Claims on folders of checkpoints: two programs that save to one would replace each other's, be it in two jobs."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple, Protocol, TextIO, final
from weakref import ReferenceType, ref

from weft.errors import UserError

# In a folder of checkpoints: the job that saves there has it open, and locked, and names itself in it.
LOCK = ".lock"


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


@final
class _Claim(NamedTuple):
    """A claim; the lock is the first process's, where the file system knows locks."""

    program: ReferenceType[Claimant]
    lock: TextIO | None


_claims: dict[Path, _Claim] = {}


def claim_for_job(folder: Path, program: Claimant) -> None:
    """Claim a folder for a program, and lock it for this job until the program is closed. Every process must call it.

    A file system that knows no locks is taken as it is.

    Raises:
        UserError: on every process, when another open program, or a program of another job, saves there.
    """
    folder = folder.resolve()
    held = _claims.get(folder)
    other = None if held is None else held.program()
    if other is program or not program.is_open:
        return
    if other is not None:
        raise UserError(
            f"another open program saves to {folder}, and each would take the checkpoints of the other for its own; "
            "give each program a folder, or close the other one before"
        )
    lock, holder = _locked(folder) if program.is_first else (None, "")
    if program.exchange is not None:
        holder = program.exchange(holder)[0]
    if holder:
        raise UserError(
            f"{holder} saves to {folder}, and each job would take the checkpoints of the other for its own; give each "
            "job a folder, or end the other one before"
        )
    _claims[folder] = _Claim(ref(program, partial(_let_go, folder)), lock)


def give_up(program: Claimant) -> None:
    """Let go of what a program has claimed."""
    for folder in [each for each, claim in _claims.items() if claim.program() is program]:
        _let_go(folder)


def is_of_another_job(folder: Path) -> bool:
    """True where another job saves to a folder, as far as its file system tells."""
    folder = folder.resolve()
    held = _claims.get(folder)
    if held is not None and held.lock is not None:
        return False
    with suppress(OSError), (folder / LOCK).open("r+") as lock:
        return not _take(lock)
    return False


def _locked(folder: Path) -> tuple[TextIO | None, str]:
    """The lock of a folder, or who has it. A folder that cannot be written to is for others to tell."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / LOCK).open("a+", errors="replace")
    except OSError:
        return None, ""
    if not _take(lock):
        with lock:
            lock.seek(0)
            return None, lock.read(200) or "another job"
    with suppress(OSError):  # a full disk; the checkpoint will say so
        lock.truncate(0)
        lock.write(f"process {os.getpid()} of host {socket.gethostname()}")
        lock.flush()
    return lock, ""


def _take(lock: TextIO) -> bool:
    """Take the lock of an open file; False where another process has it. True where there are no locks."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EACCES, errno.EAGAIN)
    return True


def _let_go(folder: Path, _: object = None) -> None:
    held = _claims.pop(folder, None)
    if held is not None and held.lock is not None:
        held.lock.close()


def _forked() -> None:
    """A process that was forked claims nothing, and its end must not keep a lock."""
    for folder in list(_claims):
        _let_go(folder)


os.register_at_fork(after_in_child=_forked)
