"""Seconds of exchanges of several sizes between ranks, without the wait for late ranks; also while calls run.

Ranks meet before each exchange; what it took is from the last arrival to the last end, as each rank sees its own part:
the largest over the ranks of one try, the median over tries.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import cycle
from statistics import median
from threading import Event, Thread
from time import perf_counter
from types import MappingProxyType

import torch

from weft.hardware.costs import Contention
from weft.hardware.durations import exchange_text
from weft.hardware.measured_costs import SizedSample
from weft.ir.plan import COLLECTIVE_KINDS, Collective, CollectiveKind, LocalValue
from weft.layout import shard_sizes
from weft.runtime.channels.channel import Channel
from weft.runtime.channels.collectives import run_collectives
from weft.runtime.profiling.call_times import summary
from weft.units import NO_BYTES, Bytes

# 64 bytes to 16 MiB, and as much as is measured at most.
SIZES = tuple(Bytes(4**power) for power in range(3, 13))
MOST = Bytes(2**28)
_TRIES = {True: 21, False: 15}
_SMALL = 2**20
_MOST_SETS = 64


def measured_exchanges(
    channel: Channel,
    begun: Callable[[str], object] = lambda _: None,
    held: Bytes = NO_BYTES,
    largest: Mapping[CollectiveKind, Bytes] = MappingProxyType({}),
) -> dict[str, tuple[SizedSample, ...]]:
    """Seconds of all kinds of exchanges between the ranks of a channel, by `exchange_text`, the same on all of them.

    A transfer goes one way, between two ranks.

    Args:
        held: bytes that a step holds: what is sent was made a while ago, and is in no cache that these fill.
        largest: bytes that programs send at once, by kind.
    """
    found = {}
    for kind in COLLECTIVE_KINDS:
        name, last = exchange_text(kind, channel.size), min(largest.get(kind, NO_BYTES), MOST)
        begun(name)
        found[name] = tuple(
            _sample(channel, size, _collective(channel, kind, size, _sets(size, held)))
            for size in (*SIZES, *([last] if last > SIZES[-1] else []))
        )
    if channel.size == 2:
        name = exchange_text("transfer", 2)
        begun(name)
        found[name] = tuple(
            _sample(channel, size, _one_way(channel, size, _sets(size, held))) for size in SIZES
        )
    return found


def _sets(size: Bytes, held: Bytes) -> int:
    return max(1, min(held // size, _MOST_SETS))


def _one_way(channel: Channel, size: Bytes, sets: int) -> Callable[[], object]:
    every = [[torch.zeros(size, dtype=torch.uint8, device=channel.device)] for _ in range(sets)]
    turns = cycle(every)
    nothing: list[list[torch.Tensor]] = [[], []]

    def work() -> None:
        tensors = next(turns)
        sends = [[], tensors] if channel.index == 0 else nothing
        receives = [tensors, []] if channel.index == 1 else nothing
        channel.exchange(sends, receives)

    return work


def _collective(
    channel: Channel, kind: CollectiveKind, size: Bytes, sets: int
) -> Callable[[], object]:
    made = _turned(channel, size) if kind == "all_to_all" else _plain(channel, kind, size)
    every = [torch.ones(made.input.shape, device=channel.device) for _ in range(sets)]
    turns = cycle(every)
    return lambda: run_collectives(channel, [made], [next(turns)])


def _plain(channel: Channel, kind: CollectiveKind, size: Bytes) -> Collective:
    count = max(size // 4, 1)
    pieces = shard_sizes(count, channel.size)
    mine = pieces[channel.index]
    given = LocalValue("given", (mine if kind == "all_gather" else count,), "float32")
    made = LocalValue("made", (mine if kind == "reduce_scatter" else count,), "float32")
    return Collective(kind, 0, given, made, sizes=pieces)


def _turned(channel: Channel, size: Bytes) -> Collective:
    ranks = channel.size
    rows = max(size // 4 // ranks, 1)
    given = LocalValue("given", (rows, ranks), "float32")
    made = LocalValue("made", (rows * ranks, 1), "float32")
    sizes, split_sizes = (rows,) * ranks, (1,) * ranks
    return Collective(
        "all_to_all", 0, given, made, split_dim=1, sizes=sizes, split_sizes=split_sizes
    )


def _sample(channel: Channel, size: Bytes, work: Callable[[], object]) -> SizedSample:
    """The median of some tries, the same on all ranks."""
    meeting, own = torch.zeros(1, device=channel.device), list[float]()
    work()  # connects, and makes buffers
    for _ in range(_TRIES[size <= _SMALL]):
        channel.all_reduce([meeting], "sum")
        start = perf_counter()
        work()
        own.append(perf_counter() - start)
    every = [
        list(map(float, text.split())) for text in channel.exchange_text(" ".join(map(repr, own)))
    ]
    return SizedSample(size, *summary([max(each) for each in zip(*every, strict=True)]))


# Calls and exchanges at the same time take longer: the cores of a host do both. A matrix product runs again and again,
# alone and beside exchanges on another thread. Both get a part of what they get alone.


# Sides of the matrices, float32 elements that are reduced, how often, and in how many tries.
_SIDE, _ELEMENTS, _TIMES, _TURNS = 256, 2**18, 30, 7
# Nothing stands still.
_LEAST = 0.05


def contention(channel: Channel) -> Contention:
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
            for _ in range(_TURNS)
        ]
    finally:
        channel.spins = spun
    calls, others = zip(*each, strict=True)
    return Contention(times_as_long(median(calls)), times_as_long(median(others)))


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
