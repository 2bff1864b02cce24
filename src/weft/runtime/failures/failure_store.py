"""The board by which failures and long waits travel between processes: entries in the job's store.

The first error is kept; the ranks that it wakes name it.
"""

from __future__ import annotations

import atexit
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

from weft.errors import RankFailure
from weft.runtime.failures.watchdog import Watchdog


@final
class PeerFailure(RankFailure):
    """This rank stopped only because another one failed; that one's error is the cause."""


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def root_failure(errors: list[BaseException]) -> BaseException:
    """The error to show of those that the ranks raised, given in the order of time: the first that no peer caused."""
    own = [error for error in errors if not isinstance(error, PeerFailure)]
    return (own or errors)[0]


# The watching thread waits this long for its entry, which is as good as for ever.
_FOREVER = timedelta(days=365)

# What a rank writes into its own entry to end its watching thread.
_CLOSED = "closed"


@final
class FailureStore:
    """The first failure of the job, known to all ranks. Every rank has an entry of its own, which it watches.

    Args:
        store: the job's store (`torch.distributed.Store`); used over two connections of the board's
            own.

    Attributes:
        lookout: looks around for those who wait long.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.failed = False
        self.lookout = Watchdog(f"weft rank {rank} lookout")
        self._store = store.clone()
        self._rank = rank
        self._size = size
        # What another rank announced. `_known` is set once it is there, or this rank has announced a failure.
        self._cause = ""
        self._known = threading.Event()
        # Who wants to know; under the lock.
        self._watchers: list[Callable[[BaseException], object]] = []
        self._lock = threading.Lock()
        # How many failures the job has gone on after; each round has entries of its own.
        self._round = 0
        self._watched = store.clone()
        self._watched.set_timeout(_FOREVER)
        self._thread = self._start()
        # A thread that is still inside the store when the interpreter ends would abort the process.
        atexit.register(self.close)

    def renew(self) -> None:
        """Forget a failure, as the job goes on; when all ranks know that it does."""
        self._write(self._rank, _CLOSED)
        self._thread.join(timeout=5)
        self.failed, self._cause = False, ""
        self._known.clear()
        self._round += 1
        self._thread = self._start()

    def _start(self) -> threading.Thread:
        name = f"weft rank {self._rank} failures"
        thread = threading.Thread(target=self._wait, args=(self._watched,), name=name, daemon=True)
        thread.start()
        return thread

    def watch(self, fail: Callable[[BaseException], object]) -> None:
        """Call `fail` with a `PeerFailure` as soon as another rank announces a failure."""
        with self._lock:
            self._watchers.append(fail)

    def forget(self, fail: Callable[[BaseException], object]) -> None:
        """Do not call `fail` any more."""
        with self._lock:
            self._watchers = [watcher for watcher in self._watchers if watcher != fail]

    def announce(self, error: BaseException) -> None:
        """Tell all other ranks of this rank's failure; each keeps the first that it hears of."""
        self.failed = True
        self._known.set()
        if isinstance(error, PeerFailure):
            return
        for rank in range(self._size):
            if rank != self._rank:
                self._write(rank, f"{self._rank} {first_line(error)}")

    def cause(self, seconds: float) -> PeerFailure | None:
        """The failure that another rank announced, or announces within so many seconds; no wait once this one failed.

        Who waited on would hold what it works with, for longer than the rank that goes on has it.
        """
        self._known.wait(seconds)
        # Another one each time: with the frames that it was raised through, it holds on to whoever called.
        return PeerFailure(self._cause) if self._cause else None

    def post(self, text: str, kind: str = "wait") -> None:
        """Say something of a kind to whoever looks, such as what this rank waits for."""
        with suppress(RuntimeError):  # the store is gone, and with it all who would read
            self._store.set(_posted_key(self._rank, kind), text)

    def posted(self, rank: int, kind: str = "wait") -> str:
        """The last text of a kind that a rank posted; "" when there is none."""
        key = _posted_key(rank, kind)
        with suppress(RuntimeError):
            return str(self._store.get(key).decode()) if self._store.check([key]) else ""
        return ""

    def close(self) -> None:
        """End the threads."""
        self.lookout.close()
        atexit.unregister(self.close)
        self._write(self._rank, _CLOSED)
        self._thread.join(timeout=5)

    def _write(self, rank: int, text: str) -> None:
        try:
            self._store.compare_set(failure_key(self._round, rank), "", text)
        except RuntimeError:  # the store is gone, and with it all who would read
            return

    def _wait(self, store: Any) -> None:
        try:
            text = store.get(failure_key(self._round, self._rank)).decode()
        except RuntimeError:  # the store is gone: its owner ended
            return
        if text == _CLOSED:
            return
        rank, _, why = text.partition(" ")
        self.failed = True
        self._cause = f"rank {self._rank} stopped: rank {rank} failed: {why}"
        self._known.set()
        with self._lock:
            watchers = list(self._watchers)
        for fail in watchers:
            fail(PeerFailure(self._cause))


def failure_key(times: int, rank: int) -> str:
    """The name in the store of what ends a rank, after the job has gone on after so many failures."""
    return f"weft/failure/{times}/{rank}"


def _posted_key(rank: int, kind: str) -> str:
    return f"weft/{kind}/{rank}"
