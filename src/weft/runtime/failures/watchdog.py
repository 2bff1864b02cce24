"""Looking around while a rank waits in calls that nothing can end: from another thread, or by waiting in one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from queue import SimpleQueue
from typing import final


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
class _HandedCall:
    call: Callable[[], None]
    ended: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None


@final
class CallThread:
    """A thread that makes one call at a time; it starts with the first one."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handed: SimpleQueue[_HandedCall | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    def run(self, call: Callable[[], None], look: Callable[[], None]) -> None:
        """Make a call there and wait for its end.

        An error of `look` ends the wait, not the call: no other one can be made then.

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


# A rank that has waited so many seconds tells the others, and looks at them as often.
PATIENCE = 1.0


@final
@dataclass(frozen=True)
class Wait:
    """The call that a rank waits in.

    Attributes:
        count: which collective of that group it is, from 1.
        begun: for every group, how many collectives this rank has begun in it.
        what: what asks for it, and where.
    """

    ranks: tuple[int, ...]
    count: int
    begun: tuple[tuple[tuple[int, ...], int], ...]
    what: str

    def came_to(self, other: Wait) -> bool:
        """True where the rank that waits here has come to another rank's collective before."""
        return dict(self.begun).get(other.ranks, 0) >= other.count

    def __str__(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def parse(text: str) -> Wait:
        """Read what `str` wrote."""
        found = json.loads(text)
        begun = tuple((tuple(ranks), count) for ranks, count in found["begun"])
        return Wait(tuple(found["ranks"]), found["count"], begun, found["what"])


def wait_cycle(rank: int, own: Wait, posted: Callable[[int], Wait | None]) -> dict[int, Wait]:
    """Ranks that wait for one another, this one first; empty where it may still go on.

    A rank that waits for nobody, because it is slow, ends the search: it will come. Entries that others posted may be
    old, but a cycle that ends at this rank, which does wait, cannot be: no rank of it can have gone on without the
    next one, which has not come.
    """
    waits = {rank: own}
    path = [rank]
    return _closed(path, waits, posted, {rank})


def _closed(
    path: list[int],
    waits: dict[int, Wait],
    posted: Callable[[int], Wait | None],
    seen: set[int],
) -> dict[int, Wait]:
    here = waits[path[-1]]
    if path[0] in here.ranks and len(path) > 1 and not waits[path[0]].came_to(here):
        return {rank: waits[rank] for rank in path}
    for peer in here.ranks:
        wait = None if peer in seen else posted(peer)
        seen.add(peer)
        if wait is None or wait.came_to(here):
            continue
        waits[peer] = wait
        found = _closed([*path, peer], waits, posted, seen)
        if found:
            return found
    return {}
