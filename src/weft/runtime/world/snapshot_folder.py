"""The folder of a run in the host's memory: it outlives the ranks, over their restarts, and goes with the launcher.

A lock says that its launcher lives. What a launcher has left that was killed goes when the next one of the same user
begins. This module needs no torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp
from typing import TextIO

from weft.runtime.world.variables import SNAPSHOTS

# A file system of Linux that lies in memory.
MEMORY = Path("/dev/shm")
_PREFIX = "weft-snapshots-"
_LOCK = "launcher.lock"


@contextmanager
def snapshot_folder(memory: Path = MEMORY) -> Iterator[None]:
    """Name a folder for snapshots to the ranks that start meanwhile, and take it away at the end.

    Where the user has named one, or the system has no such place, there is none.

    Args:
        memory: a memory file system.
    """
    if os.environ.get(SNAPSHOTS) or not os.access(memory, os.W_OK):
        yield
        return
    _clear(memory)
    try:
        folder, lock = _made(memory)
    except OSError:  # it is full; who asks for snapshots is told that there is no place
        yield
        return
    os.environ[SNAPSHOTS] = str(folder)
    try:
        yield
    finally:
        del os.environ[SNAPSHOTS]
        shutil.rmtree(folder, ignore_errors=True)
        lock.close()


def _made(memory: Path) -> tuple[Path, TextIO]:
    """Make a folder for this user alone, which has its name only when it is locked."""
    made = Path(mkdtemp(prefix=f".{_PREFIX}", dir=memory))
    try:
        lock = (made / _LOCK).open("w")
        fcntl.flock(lock, fcntl.LOCK_EX)
        return made.rename(made.with_name(made.name[1:])), lock
    except OSError:
        shutil.rmtree(made, ignore_errors=True)
        raise


def _clear(memory: Path) -> None:
    """Take away the folders of this user whose launchers are gone."""
    for folder in memory.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # another user's, or another launcher takes it away
            if folder.lstat().st_uid != os.geteuid() or folder.is_symlink():
                continue
            if (folder / _LOCK).exists():
                with (folder / _LOCK).open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            else:  # a folder has its name once it is locked: who took it away was killed on the way
                shutil.rmtree(folder, ignore_errors=True)
