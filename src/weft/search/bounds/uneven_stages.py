"""The busiest stage of a pipeline against the mean of all, where stages are cut evenly.

As `compiler.stages.balance` cuts them: between blocks, where the dearest stage is no dearer than it tolerates, else
within them. All that is outside of blocks, a head most of it, is in the last stage.
"""

from __future__ import annotations

from math import ceil

import numpy as np

from weft.compiler.stages.balance import TOLERANCE
from weft.search.space.points import Floats, Points

# Pieces of a block that are cut apart: attention and a network.
_PIECES = 2


def unevenness_of(blocks: int, outside: float, stages: int, turns: int) -> float:
    """Seconds of the busiest group of ranks over the mean of all groups.

    Args:
        blocks: that come again in the model.
        outside: the part of the step's seconds that is in none of them.
        stages: groups of ranks.
        turns: parts that each group runs.
    """
    whole = _busiest(blocks, outside, stages, turns)
    if whole <= TOLERANCE * (1 + 1e-9):
        return whole
    return min(whole, _busiest(_PIECES * blocks, outside, stages, turns))


def uneven_stages(points: Points, blocks: int, outside: float) -> Floats:
    """The same of points; 1 for those without stages."""
    pairs, inverse = np.unique(np.stack([points.stages, points.turns]), axis=1, return_inverse=True)
    every = [unevenness_of(blocks, outside, int(stages), int(turns)) for stages, turns in pairs.T]
    return np.array(every)[inverse.reshape(-1)]


def _busiest(units: int, outside: float, stages: int, turns: int) -> float:
    """The same where none of so many equal units is cut, and the last part has as few of them as is best."""
    parts = stages * turns
    if stages == 1:
        return 1.0
    unit = (1 - outside) / units

    def busiest(last: int) -> float:
        others = ceil((units - last) / (parts - 1))
        return max(turns * others * unit, ((turns - 1) * others + last) * unit + outside)

    return max(1.0, stages * min(busiest(last) for last in range(units // parts + 1)))
