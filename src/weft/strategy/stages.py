"""The number of stages of a strategy, which may name it, or each of them."""

from __future__ import annotations

from weft.strategy.strategy import Strategy


def stage_count(strategy: Strategy) -> int:
    """The number of stages; 1 where nothing says any."""
    stages = strategy.stages
    return stages if isinstance(stages, int) else max(len(stages), 1)
