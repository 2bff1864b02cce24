"""Processes that load samples: signals by which a job is told to end are left to the process that they load for.

Schedulers send SIGTERM to all processes of a job, and terminals send Ctrl-C to all. Workers that ended by it would take
away the batches of the steps that are still to come, and with them the checkpoint of the end. So they pass both over,
and are killed where they do not end by themselves once nobody needs them.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Iterable, Iterator
from multiprocessing import active_children
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any
from weakref import WeakKeyDictionary

# Of all loops, and the process that they load for.
_workers: WeakKeyDictionary[BaseProcess, int] = WeakKeyDictionary()


def begin_worker(_number: int) -> None:
    """Called in each worker at its beginning."""
    # No handler of the system's: what a worker starts would pass them over, too.
    signal.signal(signal.SIGINT, _pass_over)
    signal.signal(signal.SIGTERM, _pass_over)


def with_workers(loading: Iterable[Any]) -> Iterator[Any]:
    """An iterator of a `DataLoader` that begins its workers by `begin_worker`; where it tells them to end, they do."""
    before = set(active_children())
    iterator = iter(loading)
    for worker in set(active_children()) - before:
        worker.terminate = worker.kill  # type: ignore[method-assign]
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
