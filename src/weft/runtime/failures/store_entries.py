"""Entries in the job's store that other ranks write, waited for as long as those live."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from functools import partial
from typing import Any, final

from weft.errors import NoAnswer
from weft.runtime.failures.call_log import user_line

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
