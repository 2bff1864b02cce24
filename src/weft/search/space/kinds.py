"""The kinds of strategies that people write by hand."""

from __future__ import annotations

import numpy as np

from weft.search.space.point import SCHEDULES
from weft.search.space.points import Ints, Points

# The kinds of pipelines, by the schedule that a point names.
_SCHEDULES = {
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved",
    "zero_bubble": "zero bubble",
}
# Those without stages begin with the levels of ZeRO, in their order.
KINDS = (
    *("data parallel", "ZeRO 1", "ZeRO 2", "ZeRO 3"),
    *("Megatron grid", *_SCHEDULES.values()),
)


def kinds_of(points: Points) -> Ints:
    """The kinds of strategies that people write by hand, by their numbers in `KINDS`."""
    staged = [KINDS.index(_SCHEDULES.get(name, "Megatron grid")) for name in SCHEDULES]
    alone = np.where(points.laid("data"), points.zero, KINDS.index("Megatron grid"))
    return np.where(points.stages > 1, np.array(staged)[points.schedule], alone)
