"""A run of as many ranks as large jobs have, made up."""

from __future__ import annotations

from weft.report import Report
from weft.traces.rows import Kind, Level, RankTrace, Slice, StepSpan
from weft.units import Bytes

QUEUES: tuple[tuple[str, tuple[int, ...]], ...] = (
    *(("compute", ()), ("host", ())),
    *(("comm:0", (0, 1)), ("comm:1", (0, 2))),
)
_KINDS: tuple[tuple[str, Kind], ...] = (
    *(("compute", "compute"), ("compute", "compute"), ("compute", "wait")),
    *(("comm:0", "communication"), ("comm:1", "communication")),
)


def large_run(ranks: int, acts: int) -> Report:
    """A report of so many ranks with so many slices each, in two steps."""
    traces = []
    for rank in range(ranks):
        slices = []
        for n in range(acts):
            queue, kind = _KINDS[n % len(_KINDS)]
            begin = 20_000 * n + 37 * (rank * 7919 + n * 104_729) % 5_000
            name = f"{kind} blocks.{n // len(_KINDS) % 48}"
            details: dict[str, str | int] = {"step": 2 * n // acts, "actor": n, "calls": n % 9}
            slices.append(Slice(queue, name, kind, begin, begin + 15_000 + n % 97, details))
        end = 20_000 * acts + 20_000
        middle = 20_000 * acts // 2
        steps = (StepSpan(0, 0, middle), StepSpan(1, middle, end))
        levels = tuple(Level(end * n // 50, Bytes((n % 25) * 10**8 + rank)) for n in range(50))
        order = {queue: place for place, (queue, _) in enumerate(QUEUES)}
        slices.sort(key=lambda each: (order[each.queue], each.begin))
        traces.append(RankTrace(rank, QUEUES, steps, tuple(slices), (), levels))
    return Report(f"{ranks} ranks, {ranks * acts} acts", measured=traces)
