"""Batches that a thread loads while the steps before them run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from queue import Empty, Full, Queue
from time import perf_counter_ns
from typing import Generic, TypeVar, final

from weft.units import Seconds

T = TypeVar("T")
# Between two looks of the thread whether anybody still wants what it has; and how long it is waited for at the end.
_LOOK, _PATIENCE = Seconds(0.1), Seconds(5.0)


@final
class _Ended:
    """Stands behind the last item; `error` is what the iterator raised."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


def loaded_ahead(items: Iterator[T], number: int) -> Iterator[T]:
    """The same items, of which a thread takes up to `number` before they are asked for; none for 0.

    What `items` raises is raised in its place among them. The thread ends with the iterator that is returned.
    """
    if not number:
        yield from items
        return
    loading = _Loading(items, number)
    try:
        yield from loading.taken()
    finally:
        loading.end()


def with_waits(items: Iterable[T], note: Callable[[int, int], None]) -> Iterator[T]:
    """The same items; `note` hears before each when the wait for it began and ended, of `perf_counter_ns`."""
    begun = perf_counter_ns()
    for item in items:
        note(begun, perf_counter_ns())
        yield item
        begun = perf_counter_ns()


@final
class _Loading(Generic[T]):
    """A thread and what it has loaded.

    Args:
        items: that it takes.
        number: that it may be ahead.
    """

    def __init__(self, items: Iterator[T], number: int) -> None:
        self._items = items
        self._loaded: Queue[tuple[T] | _Ended] = Queue(number)
        self._unwanted = threading.Event()
        self._thread = threading.Thread(target=self._load, name="weft loads ahead", daemon=True)
        self._thread.start()

    def taken(self) -> Iterator[T]:
        """The items, in order."""
        while True:
            found = self._loaded.get()
            if isinstance(found, _Ended):
                if found.error is not None:
                    raise found.error
                return
            yield found[0]

    def end(self) -> None:
        """End the thread, be it that it loads."""
        self._unwanted.set()
        with suppress(Empty):
            while True:
                self._loaded.get_nowait()
        self._thread.join(_PATIENCE)

    def _load(self) -> None:
        try:
            for item in self._items:
                self._put((item,))
                if self._unwanted.is_set():
                    return
            self._put(_Ended())
        except BaseException as error:
            self._put(_Ended(error))

    def _put(self, found: tuple[T] | _Ended) -> None:
        while not self._unwanted.is_set():
            with suppress(Full):
                self._loaded.put(found, timeout=_LOOK)
                return
