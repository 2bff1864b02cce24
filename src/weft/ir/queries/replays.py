"""The reason why segments of a plan are replayed or not: the table of CUDA graphs, beside `Compute.replayed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from weft.units import Seconds

# "auto": where they pay; "always": wherever they can be had.
GraphMode: TypeAlias = Literal["auto", "always", "never"]


@final
@dataclass(frozen=True)
class Replays:
    """The findings about the segments of a rank, some of which are replayed.

    Attributes:
        reasons: for the id of every segment that is not replayed, why.
        launches: calls that the host would launch one by one in a step.
        saved: how many of them graphs spare.
        host: seconds in which it would launch them.
        device: seconds in which the device runs them.
    """

    reasons: Mapping[int, str]
    launches: int
    saved: int
    host: Seconds
    device: Seconds
