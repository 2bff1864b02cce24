"""The clocks of several hosts: by how much each is ahead of the first rank's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

# For each of some exchanges between all ranks: when a rank entered and left it, on its own clock,
# in nanoseconds.
Visits: TypeAlias = Sequence[tuple[int, int]]


def ahead(own: Visits, first: Visits) -> int:
    """By how many nanoseconds a clock is ahead of that of the first rank.

    No rank leaves an exchange before all have entered it, which bounds the difference from both
    sides. A difference of 0 is taken where it is possible, since processes of one host share their
    clock; elsewhere the middle of the bounds.

    Args:
        own: the visits of a rank.
        first: those of the first rank, to the same exchanges.
    """
    pairs = list(zip(own, first, strict=True))
    least = max(entered - left for (entered, _), (_, left) in pairs)
    most = min(left - entered for (_, left), (entered, _) in pairs)
    return 0 if least <= 0 <= most else (least + most) // 2
