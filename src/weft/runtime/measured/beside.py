"""Calls and exchanges at the same time take longer: the cores of a host do both.

A matrix product runs again and again, alone and beside exchanges on another thread. Both get a part of what they get
alone.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from threading import Event, Thread
from time import perf_counter

import torch

from weft.hardware.costs import Slowdown
from weft.runtime.channels.channel import Channel

# Sides of the matrices, float32 elements that are reduced, how often, and in how many tries.
_SIDE, _ELEMENTS, _TIMES, _TRIES = 256, 2**18, 30, 7
# Nothing stands still.
_LEAST = 0.05


def slowdown(channel: Channel) -> Slowdown:
    """By how much calls of this rank and exchanges take longer beside each other.

    All ranks of the channel call it together.
    """
    matrix = torch.ones(_SIDE, _SIDE, device=channel.device)
    made, tensor = matrix.clone(), torch.zeros(_ELEMENTS, device=channel.device)
    spun, channel.spins = channel.spins, False  # as on a thread of its own

    def exchanges() -> None:
        for _ in range(_TIMES):
            channel.all_reduce([tensor], "sum")

    try:
        exchanges()
        each = [
            _parts(channel, exchanges, lambda: torch.mm(matrix, matrix, out=made))
            for _ in range(_TRIES)
        ]
    finally:
        channel.spins = spun
    calls, others = zip(*each, strict=True)
    return Slowdown(times_as_long(median(calls)), times_as_long(median(others)))


def _parts(
    channel: Channel, exchanges: Callable[[], None], work: Callable[[], object]
) -> tuple[float, float]:
    """The parts that calls and exchanges get beside each other of what they get alone."""
    channel.barrier()
    begin = perf_counter()
    exchanges()
    alone = perf_counter() - begin
    rate = _rate(work, alone)
    channel.barrier()
    beside, took = _rate_beside(work, exchanges)
    return beside / rate, alone / took


def times_as_long(part: float) -> float:
    """The factor by which something takes longer that gets a part of what it gets alone."""
    return 1.0 / min(max(part, _LEAST), 1.0)


def _rate(work: Callable[[], object], seconds: float) -> float:
    """Calls a second, over so many seconds."""
    begin, count = perf_counter(), 0
    while (now := perf_counter()) - begin < seconds or count < 3:
        work()
        count += 1
    return count / (now - begin)


def _rate_beside(work: Callable[[], object], other: Callable[[], None]) -> tuple[float, float]:
    """Calls a second beside something on another thread, and the seconds that this takes."""
    ended = Event()

    def run() -> None:
        other()
        ended.set()

    thread = Thread(target=run, daemon=True)
    begin, count = perf_counter(), 0
    thread.start()
    while not ended.is_set():
        work()
        count += 1
    took = perf_counter() - begin
    thread.join()
    return count / took, took
