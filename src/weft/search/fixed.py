"""The entries that the user fixed, and the points of the space that keep them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from weft.errors import StrategyError, UserError
from weft.search.space import NAMED, Point, Sizes, fixed_first, points, ranks_used
from weft.search.steps.facts import StepFacts
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
        and (base.schedule is None or point.schedule == _named(point, base))
        and (base.zero is None or (point.zero == base.zero.level and not point.outer))
        and not (base.recompute and point.recompute)
        and (not base.grid or point.grid == tuple(base.grid))
    )


def space_of(facts: StepFacts, every_rank: bool) -> list[Point]:
    """The points of a step's space that keep what is fixed.

    Args:
        facts: of the step.
        every_rank: true where all ranks must take part.

    Raises:
        UserError: there is none.
    """
    base, most = facts.base, len(facts.ranks)
    sizes = Sizes(
        (most,) if every_rank else ranks_used(most),
        facts.samples,
        facts.blocks.count if facts.blocks is not None else 1,
        bool(facts.linears.rows),
        facts.positions,
    )
    found = [
        point
        for point in points(sizes)
        if fits(point, base) and (point.micro_batches == base.micro_batches or not facts.statistics)
    ]
    if not found:
        ranks_text = " or ".join(map(str, sizes.ranks))
        raise UserError(
            f"weft.search: no strategy on {ranks_text} ranks has all that is fixed: ranks of the data axis, "
            f"times micro-batches, must divide the {sizes.samples} samples of a step, ZeRO needs several ranks "
            f"along that axis, and {sizes.blocks} repeated blocks make as many stages at most; fix less, or take "
            "another size of batch or number of ranks"
        )
    return found


def with_fixed(start: Strategy, base: Strategy) -> Strategy:
    """A strategy with all entries that are fixed; of layouts and signatures those before its own."""
    plain, changed = Strategy(), dict[str, Any]()
    for name in (each.name for each in fields(Strategy)):
        own, fixed = getattr(start, name), getattr(base, name)
        if isinstance(fixed, Mapping):
            changed[name] = fixed_first(fixed, own)
        elif fixed != getattr(plain, name):
            changed[name] = fixed
    return replace(start, **changed)


def _named(point: Point, base: Strategy) -> str:
    """The schedule that a point names where one is fixed: that one, once, or none where no point names it."""
    return base.schedule if point.stages > 1 and base.schedule in NAMED else ""
