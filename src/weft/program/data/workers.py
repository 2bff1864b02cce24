"""Processes that load samples: signals by which a job is told to end are left to the process that they load for.

Schedulers send SIGTERM, or SIGUSR1, to all processes of a job, and terminals send Ctrl-C to all. Workers that ended by
it would take away the batches of the steps that are still to come, and with them the checkpoint of the end. So they
pass them over, and are killed where they do not end by themselves once nobody needs them.
"""

from __future__ import annotations

import atexit
import errno
import os
import signal
import traceback
from collections.abc import Iterable, Iterator
from multiprocessing import get_start_method, queues, resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

from weft.errors import UserError
from weft.runtime.world.interrupts import ending_signals

# Why processes of a host cannot send each other batches.
HINT = "it needs room in /dev/shm that it may write to, and a TMPDIR of less than 70 characters"
_NO_ROOM = (errno.ENOSPC, errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOENT, errno.ENOSYS)
_BLOCKED = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Of all loops, and the process that they load for.
_workers: WeakKeyDictionary[BaseProcess, int] = WeakKeyDictionary()


def begin_worker(_number: int) -> None:
    """Called in each worker at its beginning, where the signals are blocked."""
    # No handler of the system's: what a worker starts would pass them over, too.
    for number in ending_signals():
        signal.signal(number, _pass_over)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _BLOCKED)
    # A batch that cannot be sent would be dropped there, and waited for.
    queues.Queue._on_queue_feeder_error = staticmethod(_cannot_send)  # type: ignore[attr-defined]


def with_workers(loading: Iterable[Any]) -> Iterator[Any]:
    """An iterator of a `DataLoader` with workers, begun by `begin_worker`; where it tells them to end, they do.

    Raises:
        UserError: the host does not let them start.
    """
    # A worker that is spawned imports modules before it begins, and one that is forked may be by a server.
    if get_start_method() != "fork":
        resource_tracker.ensure_running()  # which, where it begins later, unblocks the signals
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _BLOCKED)
    try:
        iterator = iter(loading)
    except OSError as error:
        why = f"; {HINT}" if error.errno in _NO_ROOM else ""
        raise UserError(
            f"weft.Loader: processes that load cannot be started: {error!r}{why}; mend that, or load with workers=0"
        ) from error
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    for worker in getattr(iterator, "_workers", ()):
        worker.terminate = worker.kill
        _workers[worker] = os.getpid()
    return iterator


# Before the call of `multiprocessing`, which was registered first: it asks those that run to end, and waits for them.
@atexit.register
def _end_all() -> None:
    left = [each for each, by in _workers.items() if by == os.getpid() and each.is_alive()]
    if left:
        # torch raises when a worker is killed.
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for worker in left:
        worker.kill()


def _pass_over(_number: int, _frame: FrameType | None) -> None: ...


def _cannot_send(_error: Exception, _batch: Any) -> None:
    """Called by the thread of a worker that sends; the process that waits sees the worker end."""
    traceback.print_exc()
    os._exit(1)
