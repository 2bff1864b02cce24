"""Processes that load samples: signals by which a job is told to end are left to the process that they load for.

Schedulers send SIGTERM to all processes of a job, and terminals send Ctrl-C to all. Workers that ended by it would take
away the batches of the steps that are still to come, and with them the checkpoint of the end.
"""

from __future__ import annotations

import atexit
import os
import signal
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.sharedctypes import RawValue
from types import FrameType
from typing import Any, Protocol, final
from weakref import WeakSet


class _Flag(Protocol):
    """A number that processes share."""

    value: int


@final
class Workers:
    """The workers of one loop over samples. They end when they are asked to once that loop has ended.

    Attributes:
        over: 1 once it has.
    """

    def __init__(self) -> None:
        self.over: _Flag = RawValue("b", 0)
        _known.add(self)

    @contextmanager
    def loop(self, loading: Iterable[Any]) -> Iterator[Iterator[Any]]:
        """An iterator of `loading`, whose workers may end with the body."""
        iterator = iter(loading)
        try:
            yield iterator
        finally:
            # torch asks its workers to end where the last reference to the iterator goes.
            self.over.value = 1

    def begin(self, _number: int) -> None:
        """Called in each worker at its beginning."""
        signal.signal(signal.SIGINT, _pass_over)
        signal.signal(signal.SIGTERM, self._terminated)

    def __getstate__(self) -> dict[str, Any]:
        return {"over": self.over}

    def _terminated(self, number: int, _frame: FrameType | None) -> None:
        if self.over.value:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_known: WeakSet[Workers] = WeakSet()


# Before the call of `multiprocessing`, which was registered first: it terminates those that run, and waits for them.
@atexit.register
def _end_all() -> None:
    for workers in list(_known):
        workers.over.value = 1


def _pass_over(_number: int, _frame: FrameType | None) -> None: ...
