"""The failure store: processes exchange failures and long waits as entries in the job's store.

The first error is kept; the ranks that it wakes name it.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from queue import SimpleQueue
from typing import Any, final

from weft.errors import NoAnswer, RankFailure
from weft.files import user_line


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

# The text that a rank writes into its own entry to end its watching thread.
_CLOSED = "closed"


@final
class FailureStore:
    """The first failure of the job, known to all ranks. Every rank has an entry of its own, which it watches.

    Args:
        store: the job's store (`torch.distributed.Store`); used over two connections of the failure store's
            own.

    Attributes:
        watchdog: looks around for those who wait long.
    """

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.failed = False
        self.watchdog = Watchdog(f"weft rank {rank} watchdog")
        self._store = store.clone()
        self._rank = rank
        self._size = size
        # The failure that another rank announced. `_known` is set once it is there, or this rank has announced a
        # failure.
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
        """Forget a failure, as the job continues; when all ranks know that it does."""
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

        Who waited on would hold what it works with, for longer than the rank that continues has it.
        """
        self._known.wait(seconds)
        # Another one each time: with the frames that it was raised through, it holds on to whoever called.
        return PeerFailure(self._cause) if self._cause else None

    def post(self, text: str) -> None:
        """Say something to whoever looks: the calls of this rank, and what it waits for."""
        with suppress(RuntimeError):  # the store is gone, and with it all who would read
            self._store.set(f"weft/calls/{self._rank}", text)

    def posted(self, rank: int) -> str:
        """The last text that a rank posted; "" when there is none."""
        key = f"weft/calls/{rank}"
        with suppress(RuntimeError):
            return str(self._store.get(key).decode()) if self._store.check([key]) else ""
        return ""

    def close(self) -> None:
        """End the threads."""
        self.watchdog.close()
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


@final
@dataclass(frozen=True, eq=False)
class _Wait:
    since: float
    look: Callable[[], None]
    fail: Callable[[Exception], object]


@final
class Watchdog:
    """A thread that looks around for all who wait longer than `PATIENCE`; it starts with the first wait."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._waits: set[_Wait] = set()
        self._closed, self._lock = threading.Event(), threading.Lock()
        self._thread: threading.Thread | None = None

    @contextmanager
    def over(self, look: Callable[[], None], fail: Callable[[Exception], object]) -> Iterator[None]:
        """Look around while the body waits; `fail` gets what `look` raises."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._watch, name=self._name, daemon=True)
                self._thread.start()
        wait = _Wait(time.monotonic(), look, fail)
        self._waits.add(wait)
        try:
            yield
        finally:
            self._waits.discard(wait)

    def close(self) -> None:
        """End the thread."""
        self._closed.set()

    def _watch(self) -> None:
        while not self._closed.wait(PATIENCE):
            for wait in tuple(self._waits):
                if time.monotonic() - wait.since >= PATIENCE:
                    try:
                        wait.look()
                    except Exception as error:
                        wait.fail(error)
                        self._waits.discard(wait)


@final
@dataclass(eq=False)
class HandedCall:
    """A call for another thread; `ended` is set when it has been made, `error` is what it raised."""

    call: Callable[[], None]
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


@final
class CallThread:
    """A thread that makes one call at a time; it starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handed: SimpleQueue[HandedCall | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def start(self, call: Callable[[], None]) -> HandedCall:
        """Begin a call there, after those that were begun before."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        handed = HandedCall(call)
        self._handed.put(handed)
        return handed

    def run(self, call: Callable[[], None], look: Callable[[], None]) -> None:
        """Make a call there and wait for its end.

        An error of `look` ends the wait, not the call: no other one can be made then.

        Args:
            call: what it raises is raised here.
            look: called every `PATIENCE` seconds meanwhile.
        """
        handed = self.start(call)
        while not handed.ended.wait(PATIENCE):
            look()
        if handed.error is not None:
            raise handed.error

    def close(self) -> None:
        """End the thread, after the call that it makes."""
        self._handed.put(None)

    def join(self) -> None:
        """Wait until the thread has ended."""
        if self._thread is not None:
            self._thread.join()

    def _work(self) -> None:
        while (handed := self._handed.get()) is not None:
            try:
                handed.call()
            except BaseException as error:
                handed.error = error
            ended = handed.ended
            del handed  # what it refers to must not live until the next call
            ended.set()


# A rank that has waited so many seconds tells the others, and looks at them as often.
PATIENCE = 1.0


# Seconds between two looks at entries: at first, and at most.
_SOON, _LATE = 0.001, 0.2


@final
class StoreEntries:
    """Entries of a job's store, each of which a rank writes once.

    Args:
        seconds: after which one that has written nothing counts as lost.
    """

    def __init__(self, store: Any, rank: int, gone: Callable[[int], bool], seconds: float) -> None:
        self._store, self._rank, self._gone, self._seconds = store, rank, gone, seconds

    def write(self, key: str, text: str) -> None:
        """Write an entry."""
        self._store.set(key, text)

    def read(self, key: str, rank: int, place: str) -> str:
        """An entry, once a rank has written it."""
        self.wait({rank: key}, place)
        return str(self._store.get(key).decode())

    def wait(self, keys: Mapping[int, str], place: str) -> None:
        """Wait for entries.

        Args:
            place: to which a rank comes by that, for errors.
        """
        pause, end, missing = _SOON, time.monotonic() + self._seconds, dict(keys)
        while missing := {r: key for r, key in missing.items() if not self._store.check([key])}:
            # It may have written, worked and ended since it was looked for.
            self.look(missing, place, partial(self._is_there, missing))
            if time.monotonic() > end:
                late = f"rank {min(missing)} did not come within {self._seconds:.0f} s to {place}"
                raise NoAnswer(late + self._waits())
            time.sleep(pause)
            pause = min(2 * pause, _LATE)

    def _is_there(self, keys: Mapping[int, str], rank: int) -> bool:
        return bool(self._store.check([keys[rank]]))

    def look(
        self, ranks: Collection[int], place: str, came: Callable[[int], bool] = lambda _: False
    ) -> None:
        """Raise where this rank waits in vain.

        Args:
            came: whether one has come there, asked once it has ended.
        """
        for rank in ranks:
            if self._gone(rank) and not came(rank):
                raise NoAnswer(f"rank {rank} has ended before it came to {place}{self._waits()}")

    def _waits(self) -> str:
        file, line = user_line()
        return f": rank {self._rank} waits for it in {file}:{line}"
