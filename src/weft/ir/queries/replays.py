"""Why segments of a plan are replayed or not: what the table of CUDA graphs shows beside `Compute.replayed`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from weft.units import Seconds

# "auto": where they pay; "always": wherever they can be had.
GraphMode: TypeAlias = Literal["auto", "always", "never"]


@dataclass(frozen=True)
class Replays:
    """How the segments of a rank were looked at.

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
