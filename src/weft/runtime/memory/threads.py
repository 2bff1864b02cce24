"""Threads whose tensors lie on the heap of the process.

glibc gives a thread the heap of one that has ended, or one that another library's threads have, whatever weft has set
up: heaps of threads hold 64 MiB at most, larger tensors come from the system anew in every step. Nothing moves a
thread to another heap; so threads are started, and held, until one has the heap of the process.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable
from functools import cache
from queue import SimpleQueue
from typing import final

from weft.runtime.memory.allocator import is_free_to_choose

# Bytes that no thread keeps for itself: they tell which heap it has.
_BYTES = 1 << 14
# In what stands before an allocation: on the heap of a thread, or on none.
_NOT_MAIN, _MAPPED = 4, 2
# Threads that are started at most; glibc makes eight heaps for a core.
_MOST = 64


@final
class HeapThread(threading.Thread):
    """A thread whose large tensors stay with the process when they are freed.

    Takes what `threading.Thread` takes. Where it has another heap than the process, the work is done by a further
    thread of that name, which this one waits for.
    """

    def start(self) -> None:
        """Start, and wait until the thread that does the work is found: the others have ended by then."""
        self._found = threading.Event()
        super().start()
        self._found.wait()

    def run(self) -> None:
        """Do the work, on the heap of the process if there is a way."""
        try:
            other = None if on_main_heap() is not False else self._other()
        finally:
            self._found.set()
        if other is None:
            super().run()
        else:
            other.told.put(True)
            other.thread.join()

    def _other(self) -> _Candidate:
        """A thread on the heap of the process, or the last that was tried; the others have ended."""
        started: list[_Candidate] = []
        while len(started) < _MOST and not (started and started[-1].fits):
            started.append(_Candidate(self.name, super().run))
        for each in started[:-1]:
            each.told.put(False)
            each.thread.join()
        return started[-1]


@final
class _Candidate:
    """A thread that may do the work, and says whether it has the right heap."""

    def __init__(self, name: str, work: Callable[[], None]) -> None:
        self.told: SimpleQueue[bool] = SimpleQueue()
        answer: SimpleQueue[bool] = SimpleQueue()

        def live() -> None:
            answer.put(on_main_heap() is not False)
            if self.told.get():
                work()

        self.thread = threading.Thread(target=live, name=name, daemon=True)
        self.thread.start()
        self.fits = answer.get()


def on_main_heap() -> bool | None:
    """True where what the calling thread allocates comes from the heap of the process.

    Returns:
        None where that cannot be told: another allocator, or one that weft leaves alone.
    """
    glibc = _glibc()
    if glibc is None or not is_free_to_choose(os.environ):
        return None
    place = glibc.malloc(_BYTES)
    if not place:
        return None
    head = ctypes.c_size_t.from_address(place - ctypes.sizeof(ctypes.c_size_t)).value
    glibc.free(place)
    return None if head & _MAPPED else not head & _NOT_MAIN


@cache
def _glibc() -> ctypes.CDLL | None:
    """glibc, where memory comes from it: not where an allocator was loaded before it."""
    if sys.platform != "linux" or not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"):
        return None
    own, loaded = ctypes.CDLL("libc.so.6"), ctypes.CDLL(None)
    if _address(own.malloc) != _address(loaded.malloc):
        return None
    own.malloc.restype, own.malloc.argtypes = ctypes.c_void_p, (ctypes.c_size_t,)
    own.free.restype, own.free.argtypes = None, (ctypes.c_void_p,)
    return own


def _address(function: object) -> int | None:
    return ctypes.cast(function, ctypes.c_void_p).value  # type: ignore[arg-type]
