"""The folders of a run: that in the host's memory outlives the ranks, over their restarts, and goes with the launcher.

A lock says that its launcher lives. What a launcher has left that was killed goes when the next one of the same user
begins. This module needs no torch.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from tempfile import mkdtemp

from weft.runtime.world.variables import SNAPSHOTS

# A file system of Linux that lies in memory.
MEMORY = Path("/dev/shm")
_PREFIX = "weft-snapshots-"
_LOCK = "launcher.lock"


@contextmanager
def snapshot_folder(memory: Path = MEMORY) -> Iterator[None]:
    """Name a folder for snapshots to the ranks that start meanwhile, and take it away at the end.

    Where the user has named one, or the system has no such place, there is none.
    """
    with ExitStack() as stack:
        if not os.environ.get(SNAPSHOTS) and os.access(memory, os.W_OK):
            with suppress(
                OSError
            ):  # it is full; who asks for snapshots is told that there is no place
                folder = stack.enter_context(run_folder(memory, _PREFIX))
                os.environ[SNAPSHOTS] = str(folder)
                stack.callback(os.environ.pop, SNAPSHOTS)
        yield


@contextmanager
def run_folder(place: Path, prefix: str) -> Iterator[Path]:
    """A folder for this user alone, while the body runs; those that launchers have left that were killed go before.

    Raises:
        OSError: it cannot be made.
    """
    _clear(place, prefix)
    # It has its name only when it is locked.
    made = Path(mkdtemp(prefix=f".{prefix}", dir=place))
    try:
        with (made / _LOCK).open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            made = made.rename(made.with_name(made.name[1:]))
            yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _clear(place: Path, prefix: str) -> None:
    """Take away the folders of this user whose launchers are gone."""
    for folder in place.glob(f"{prefix}*"):
        with suppress(OSError):  # another user's, or another launcher takes it away
            if folder.lstat().st_uid != os.geteuid() or folder.is_symlink():
                continue
            if (folder / _LOCK).exists():
                with (folder / _LOCK).open("r+") as lock:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    shutil.rmtree(folder, ignore_errors=True)
            else:  # a folder has its name once it is locked: who took it away was killed on the way
                shutil.rmtree(folder, ignore_errors=True)
