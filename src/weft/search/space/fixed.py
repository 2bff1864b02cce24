"""The space of points by its sizes; the entries that the user fixed, and the points that keep them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any, TypeAlias, final

import numpy as np

from weft.errors import StrategyError, UserError
from weft.hardware import is_launched
from weft.search.space.point import IN_TURN, NAMED, ONCE, Layouts, Point, fixed_first
from weft.search.space.points import Ints, Mask, Points, layouts_code, schedule_code
from weft.search.steps.facts import StepFacts
from weft.strategy.parts import highest_level, zero_axis
from weft.strategy.strategy import Strategy, stage_count
from weft.strategy.text import LAYOUTS
from weft.units import counted

# Numbers of blocks that run again, and of those that wait in host memory.
_Kept: TypeAlias = tuple[tuple[int, int], ...]


@final
@dataclass(frozen=True)
class Sizes:
    """The sizes that say how large the space is.

    Attributes:
        ranks: numbers of ranks that may be used.
        samples: of the batch; 0 where it cannot be cut.
        blocks: that come again; 1 where none do.
        parts: that stages can be made of, one at least each.
        cuts: true where there are layers that a Megatron grid cuts.
        positions: true where the activations between them have positions that can be split.
        hosts: true where devices have a host whose memory is not their own.
        experts: what the numbers of experts of all mixtures are multiples of; 0 without any.
        micro_batches: the number that is fixed; 0 for none.
        stages: the number of stages, of all ranks together, that is fixed, which may be more than there are parts; 0
            for none.
        idle: true where ranks along the data axis may be without a sample.
    """

    ranks: tuple[int, ...]
    samples: int
    blocks: int
    parts: int
    cuts: bool
    positions: bool
    hosts: bool = False
    experts: int = 0
    micro_batches: int = 0
    stages: int = 0
    idle: bool = False

    @property
    def kept(self) -> _Kept:
        """Ways of the results of blocks until the backward: kept, made again, or sent to the host."""
        if self.blocks < 2:
            return ((0, 0),)
        host = ((0, self.blocks),) if self.hosts else ()
        return ((0, 0), (self.blocks, 0), *host)


def points(sizes: Sizes) -> Points:
    """All points of the space, each once.

    Of blocks all or none run again here: how many of them suffice is found when the memory of both is known.
    """
    found = [part for ranks in sizes.ranks for part in _of_ranks(sizes, ranks)]
    return Points(np.concatenate(found)) if found else Points.of(())


def _of_ranks(sizes: Sizes, ranks: int) -> Iterator[Ints]:
    for stages in divisors(ranks):
        if stages > max(sizes.parts, 1) and stages != sizes.stages:
            continue
        for tensor in divisors(ranks // stages):
            data = ranks // stages // tensor
            fits = _in_time(sizes, data)
            for turns in _turns(sizes.blocks, stages):
                for layouts, outer in _ways(sizes, data, tensor, stages):
                    zeros = 4 if data > 1 and layouts != "free" else 1
                    inner = _inner(fits, _schedules(stages, turns), zeros, sizes.kept)
                    grid = data, tensor, stages, turns
                    yield _rows(grid, layouts, outer, inner)
                    if zeros > 1 and sizes.experts and sizes.experts % data == 0:
                        yield _rows(grid, layouts, outer, inner, experts=True)


def _in_time(sizes: Sizes, data: int) -> tuple[int, ...]:
    """Numbers of micro-batches of which each has a sample for every rank along the data axis, or more for some."""
    samples, fixed = sizes.samples, sizes.micro_batches
    if not samples:
        return (1,)
    every = (fixed,) if fixed else (1, *_powers(samples))
    return tuple(
        each for each in every if samples % each == 0 and (sizes.idle or samples // each >= data)
    )


def _turns(blocks: int, stages: int) -> Sequence[int]:
    """Numbers of parts of a pipeline that each group of ranks may run: of equally many blocks, where these can be."""
    if stages == 1:
        return [1]
    most = blocks // stages
    return divisors(most) if blocks % stages == 0 else [1, *_powers(most)]


def _schedules(stages: int, turns: int) -> tuple[str, ...]:
    if stages == 1:
        return ("",)
    return ("", *(IN_TURN if turns > 1 else ONCE))


# The coordinates that are combined on a grid, in this order.
_INNER = ("micro_batches", "schedule", "zero", "recompute", "offload")


@cache
def _inner(micro: tuple[int, ...], schedules: tuple[str, ...], zeros: int, kept: _Kept) -> Ints:
    """Micro-batches, schedules, levels of ZeRO, and what becomes of the results of blocks: all combinations."""
    codes = map(schedule_code, schedules)
    every = product(micro, codes, range(zeros), kept)
    return np.array([(m, s, z, *k) for m, s, z, k in every], np.int64).reshape(-1, len(_INNER))


def _rows(
    grid: tuple[int, int, int, int],
    layouts: Layouts,
    outer: bool,
    inner: Ints,
    experts: bool = False,
) -> Ints:
    data, tensor, stages, turns = grid
    return Points.made(
        len(inner),
        data=data,
        tensor=tensor,
        stages=stages,
        layouts=layouts_code(layouts),
        outer=int(outer),
        turns=turns,
        experts=int(experts),
        **dict(zip(_INNER, inner.T, strict=True)),
    ).rows


def _ways(sizes: Sizes, data: int, tensor: int, stages: int) -> Iterator[tuple[Layouts, bool]]:
    """Ways to lay a model out on a grid, and whether the tensor axis is the outer one."""
    if tensor == 1:
        yield "data", False
    if stages == 1 and data * tensor > 1 and (tensor == 1 or data > 1):  # one axis has no two names
        yield "free", False
    if tensor == 1 or not sizes.cuts:
        return
    for outer in (False, True) if data > 1 else (False,):
        yield "columns", outer
        if sizes.positions:
            yield "sequence", outer


@cache
def divisors(number: int) -> Sequence[int]:
    """The divisors of a number, the least first; none of 0."""
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _powers(most: int) -> list[int]:
    """2, 4, … up to `most`."""
    return [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]


def ranks_used(devices: int, stages: int = 1) -> tuple[int, ...]:
    """Numbers of ranks that are tried, all first: the divisors of the number of devices.

    Where none of them can be so many stages, also the most that can.
    """
    found = divisors(devices)
    if all(each % stages for each in found) and devices >= stages:
        found = sorted((*found, devices - devices % stages))
    return tuple(reversed(found))


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
