"""The sums over micro-batches of what a communication brings, which only the end of the step waits for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from weft.compiler.schedule.bucket import Bucket, Schedule, ScheduleItem
from weft.ir.nodes import OVER_STEP
from weft.ir.plan import LocalCall


def sums_of_communicated(schedule: Schedule) -> frozenset[str]:
    """Communicated values that only become a sum over micro-batches, what calls make of one of them, and the sum."""
    readers: dict[str, list[ScheduleItem]] = {}
    for item in schedule:
        for name in item.reads:
            readers.setdefault(name, []).append(item)
    communicated = (v.name for item in schedule if isinstance(item, Bucket) for v in item.makes)
    return frozenset(made for name in communicated for made in _way_to_sum(name, readers))


def _way_to_sum(name: str, readers: Mapping[str, list[ScheduleItem]]) -> Iterator[str]:
    """The values from a communicated one to its sum over micro-batches; none where anything else reads one of them."""
    way = [name]
    while len(found := readers.get(name, [])) == 1:
        reader = found[0]
        if not isinstance(reader, LocalCall) or len(reader.reads) != 1 or len(reader.makes) != 1:
            return
        name = reader.makes[0].name
        way.append(name)
        if reader.op in OVER_STEP:
            yield from way
            return
