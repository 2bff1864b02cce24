"""The entries that the user fixed, and the points of the space that keep them."""

from __future__ import annotations

from dataclasses import fields, replace
from math import prod
from typing import Any

import numpy as np

from weft.errors import StrategyError, UserError
from weft.hardware import is_launched
from weft.search.space.point import NAMED, Point, fixed_first
from weft.search.space.points import Mask, Points
from weft.search.space.space import Sizes, points, ranks_used
from weft.search.steps.facts import StepFacts
from weft.strategy.sharding import highest_level, zero_axis
from weft.strategy.stages import stage_count
from weft.strategy.strategy import Strategy
from weft.strategy.text import LAYOUTS
from weft.units import counted


def hand_only(base: Strategy) -> bool:
    """True where stages are fixed with their modules and ranks: what else there is, is planned as it stands."""
    return isinstance(base.stages, tuple) and bool(base.stages)


def fits(point: Point, base: Strategy) -> bool:
    """True where a point has the stages, micro-batches, schedule, shards, recompute and grid that were fixed.

    Raises:
        StrategyError: when something is fixed that no point can have.
    """
    return bool(fitting(Points.one(point), base)[0])


def fitting(found: Points, base: Strategy) -> Mask:
    """Those of the points that do.

    Raises:
        StrategyError: when something is fixed that no point can have.
    """
    axis = zero_axis(base.zero)
    if axis is not None and axis > 1:
        raise StrategyError(
            f"fixed: points of the search have a data axis and a tensor axis, and ZeRO along axis {axis} "
            "is none of these; give it axis 0"
        )
    mask = _with_axes(found, base)
    if isinstance(base.stages, int):
        mask &= found.stages * found.turns == base.stages
    if base.micro_batches != 1:
        mask &= found.micro_batches == base.micro_batches
    if base.schedule is not None:
        named = base.schedule if base.schedule in NAMED else ""
        mask &= found.scheduled(named) | ((found.stages == 1) & found.scheduled(""))
    if base.zero is not None:
        mask &= (found.zero == highest_level(base.zero)) & ~found.outer
    if base.in_flight is not None:
        mask &= found.stages * found.turns == len(base.in_flight)
    for entry, blocks in (("recompute", found.recompute), ("offload", found.offload)):
        if getattr(base, entry):
            mask &= blocks == 0
    if base.grid:
        grid = tuple(base.grid)
        mask &= np.fromiter((point.grid == grid for point in found), np.bool_, len(found))
    return mask


def _with_axes(found: Points, base: Strategy) -> Mask:
    """Those whose grid has the axis of the shards, and an axis for each SBP of what is said for every axis."""
    axis = zero_axis(base.zero)
    mask: Mask = found.axes > (axis or 0)
    for count in _axes_said(base):
        mask &= found.axes == count
    return mask


def _axes_said(base: Strategy) -> list[int]:
    """The numbers of axes for which layouts and signatures are said one by one."""
    entries = (getattr(base, name) for name in (*LAYOUTS, "signatures"))
    every = (said for entry in entries for said in entry.values())
    return sorted({len(said) for said in every if isinstance(said, tuple)})


def space_of(facts: StepFacts, every_rank: bool) -> Points:
    """The points of a step's space that keep what is fixed.

    Args:
        facts: of the step.
        every_rank: true where all ranks must take part.

    Raises:
        UserError: there is none.
    """
    base = facts.base
    sizes = _sizes(facts, every_rank)
    for idle in (False, True):
        every = points(replace(sizes, idle=idle))
        mask = fitting(every, base)
        if facts.statistics:
            mask &= every.micro_batches == base.micro_batches
        if mask.any():
            return every.where(mask)
    ranks_text = " or ".join(map(str, sizes.ranks))
    raise UserError(
        f"weft.search: no strategy on {ranks_text} {'rank' if ranks_text == '1' else 'ranks'} has all that is fixed"
        f"{_said(base)}: a grid has all of these ranks, stages divide them, the number of micro-batches divides the "
        f"{sizes.samples} samples of a step, ZeRO needs its axis and several ranks along the data axis, layouts for "
        "several axes need a grid of as many; fix less, or take another size of batch or number of ranks"
    )


def _sizes(facts: StepFacts, every_rank: bool) -> Sizes:
    """The sizes of the space, with numbers that are fixed among those that are tried."""
    base, most = facts.base, len(facts.ranks)
    stages = base.stages if isinstance(base.stages, int) else 0
    used = ranks_used(most, max(stages, 1))
    fixed = prod(base.grid)
    if base.grid and fixed < most:
        used = tuple(sorted({*used, fixed}, reverse=True))
    return Sizes(
        (most,) if every_rank else used,
        facts.samples,
        facts.blocks.count if facts.blocks is not None else 1,
        facts.parts,
        bool(facts.linears.rows),
        facts.positions,
        is_launched(facts.machine.device_type),
        facts.experts.count,
        base.micro_batches if base.micro_batches > 1 else 0,
        stages,
    )


def _said(base: Strategy) -> str:
    """The entries of a base that leave points out, as text."""
    names = ("grid", "stages", "micro_batches", "schedule", "in_flight", "zero")
    plain = Strategy()
    said = [
        f"{name}={getattr(base, name)!r}"
        for name in names
        if getattr(base, name) != getattr(plain, name)
    ]
    said += [f"layouts on {counted(count, 'axis', 'axes')}" for count in _axes_said(base)]
    return f" ({', '.join(said)})" if said else ""


def with_fixed(start: Strategy, base: Strategy) -> Strategy:
    """A strategy with all entries that are fixed; of layouts and signatures those before its own.

    Micro-batches in flight that fit another number of stages are left out.
    """
    plain, changed = Strategy(), dict[str, Any]()
    for name in (each.name for each in fields(Strategy)):
        own, fixed = getattr(start, name), getattr(base, name)
        if name in (*LAYOUTS, "signatures"):
            changed[name] = fixed_first(fixed, own)
        elif fixed != getattr(plain, name):
            changed[name] = fixed
    return with_fitting_in_flight(replace(start, **changed), base)


def with_fitting_in_flight(strategy: Strategy, base: Strategy) -> Strategy:
    """A strategy whose micro-batches in flight are fixed, or of as many stages as it has."""
    count, given = stage_count(strategy), strategy.in_flight
    fits = given is None or base.in_flight is not None or len(given) == count > 1
    return strategy if fits else replace(strategy, in_flight=None)
