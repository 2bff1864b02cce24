"""The entries that the user fixed, and the points of the space that keep them."""

from __future__ import annotations

from weft.errors import StrategyError
from weft.search.space import Point
from weft.strategy.strategy import Strategy


def hand_only(base: Strategy) -> bool:
    """True where stages are fixed with their modules and ranks: what else there is, is planned as it stands."""
    return isinstance(base.stages, tuple) and bool(base.stages)


def fits(point: Point, base: Strategy) -> bool:
    """True where a point has the stages, micro-batches, schedule, shards, recompute and grid that were fixed.

    Raises:
        StrategyError: when something is fixed that no point can have.
    """
    if base.zero is not None and base.zero.axis > 1:
        raise StrategyError(
            f"fixed: points of the search have a data axis and a tensor axis, and ZeRO along axis {base.zero.axis} "
            "is none of these; give it axis 0"
        )
    stages = base.stages if isinstance(base.stages, int) else 1
    return (
        (stages == 1 or point.stages == stages)
        and base.micro_batches in (1, point.micro_batches)
        and (base.schedule is None or (point.schedule or None) in (None, base.schedule))
        and (base.zero is None or (point.zero == base.zero.level and not point.outer))
        and not (base.recompute and point.recompute)
        and (not base.grid or point.grid == tuple(base.grid))
    )
