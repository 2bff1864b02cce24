"""Looking around while a rank waits in calls that nothing can end: from another thread, or by waiting in one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import final

from weft.runtime.failures.waits import PATIENCE


@final
@dataclass(frozen=True, eq=False)
class _Wait:
    """Since when somebody waits, what looks around, and who is told what it raises."""

    since: float
    look: Callable[[], None]
    fail: Callable[[Exception], object]


@final
class Lookout:
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
class _HandedCall:
    """A call that the other thread makes, and how it ended."""

    call: Callable[[], None]
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


@final
class OtherThread:
    """A thread that makes one call at a time; it starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handed: SimpleQueue[_HandedCall | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], None], look: Callable[[], None]) -> None:
        """Make a call there and wait for its end.

        What `look` raises ends the wait, not the call: no other one can be made then.

        Args:
            call: what it raises is raised here.
            look: called every `PATIENCE` seconds meanwhile.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        handed = _HandedCall(call)
        self._handed.put(handed)
        while not handed.ended.wait(PATIENCE):
            look()
        if handed.error is not None:
            raise handed.error

    def close(self) -> None:
        """End the thread, after the call that it makes."""
        self._handed.put(None)

    def _work(self) -> None:
        while (handed := self._handed.get()) is not None:
            try:
                handed.call()
            except BaseException as error:
                handed.error = error
            handed.ended.set()
