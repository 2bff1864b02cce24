"""The space of candidates by its sizes; the entries that the user fixed, and the candidates that keep them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from functools import cache
from itertools import product
from math import prod
from typing import Any

import numpy as np

from weft.errors import StrategyError, UserError
from weft.hardware import is_launched
from weft.search.candidate import IN_TURN, NAMED, ONCE, Candidate, Layouts, fixed_first
from weft.search.candidate_table import (
    CandidateTable,
    Ints,
    Mask,
    layouts_code,
    schedule_code,
)
from weft.search.steps.facts import StepFacts
from weft.strategy.parts import highest_level, zero_axis
from weft.strategy.strategy import Strategy, stage_count
from weft.strategy.text import LAYOUTS
from weft.units import counted


def candidates(facts: StepFacts, every_rank: bool, idle: bool) -> CandidateTable:
    """All candidates of the space of a step, each once.

    Here all blocks are recomputed or none; the number needed is found once the memory of both is known.

    Args:
        facts: of the step.
        every_rank: true if all ranks must take part.
        idle: true if ranks along the data axis may be without a sample.
    """
    found = [part for ranks in _ranks(facts, every_rank) for part in _of_ranks(facts, ranks, idle)]
    return CandidateTable(np.concatenate(found)) if found else CandidateTable.of(())


def _ranks(facts: StepFacts, every_rank: bool) -> tuple[int, ...]:
    """Numbers of ranks that are tried, all first: the divisors of the number of devices, and what is fixed.

    Where none of them can be the stages that are fixed, also the most that can.
    """
    base, most = facts.base, len(facts.ranks)
    if every_rank:
        return (most,)
    stages, fixed, found = _fixed_stages(facts) or 1, prod(base.grid), set(divisors(most))
    if all(each % stages for each in found) and most >= stages:
        found.add(most - most % stages)
    if base.grid and fixed < most:
        found.add(fixed)
    return tuple(sorted(found, reverse=True))


def _fixed_stages(facts: StepFacts) -> int:
    return facts.base.stages if isinstance(facts.base.stages, int) else 0


def _of_ranks(facts: StepFacts, ranks: int, idle: bool) -> Iterator[Ints]:
    blocks = facts.blocks.count if facts.blocks is not None else 1
    # Results of blocks until the backward: kept, made again, or sent to the host.
    kept: tuple[tuple[int, int], ...] = ((0, 0),)
    if blocks > 1:
        host = ((0, blocks),) if is_launched(facts.machine.device_type) else ()
        kept = (*kept, (blocks, 0), *host)
    experts = facts.experts.count
    for stages in divisors(ranks):
        if stages > max(facts.parts, 1) and stages != _fixed_stages(facts):
            continue
        for tensor in divisors(ranks // stages):
            data = ranks // stages // tensor
            micro = _in_time(facts, data, idle)
            for turns in _turns(blocks, stages):
                for layouts, outer in _ways(facts, data, tensor, stages):
                    zeros = 4 if data > 1 and layouts != "free" else 1
                    named = IN_TURN if turns > 1 else ONCE
                    schedules = ("", *named) if stages > 1 else ("",)
                    inner = _inner(micro, schedules, zeros, kept)
                    for split in (0, 1) if zeros > 1 and experts and experts % data == 0 else (0,):
                        yield CandidateTable.made(
                            len(inner),
                            data=data,
                            tensor=tensor,
                            stages=stages,
                            layouts=layouts_code(layouts),
                            outer=int(outer),
                            turns=turns,
                            experts=split,
                            **dict(zip(_INNER, inner.T, strict=True)),
                        ).rows


def _in_time(facts: StepFacts, data: int, idle: bool) -> tuple[int, ...]:
    """Numbers of micro-batches of which each has a sample for every rank along the data axis, or more for some."""
    samples, fixed = facts.samples, facts.base.micro_batches
    if not samples:
        return (1,)
    every = (fixed,) if fixed > 1 else (1, *_powers(samples))
    return tuple(
        each for each in every if samples % each == 0 and (idle or samples // each >= data)
    )


def _turns(blocks: int, stages: int) -> Sequence[int]:
    """Numbers of parts of a pipeline that each group of ranks may run: of equally many blocks, where these can be."""
    if stages == 1:
        return [1]
    most = blocks // stages
    return divisors(most) if blocks % stages == 0 else [1, *_powers(most)]


# The coordinates that are combined on a grid, in this order.
_INNER = ("micro_batches", "schedule", "zero", "recompute", "offload")


@cache
def _inner(
    micro: tuple[int, ...],
    schedules: tuple[str, ...],
    zeros: int,
    kept: tuple[tuple[int, int], ...],
) -> Ints:
    """Micro-batches, schedules, levels of ZeRO, and what becomes of the results of blocks: all combinations."""
    every = product(micro, map(schedule_code, schedules), range(zeros), kept)
    return np.array([(m, s, z, *k) for m, s, z, k in every], np.int64).reshape(-1, len(_INNER))


def _ways(facts: StepFacts, data: int, tensor: int, stages: int) -> Iterator[tuple[Layouts, bool]]:
    """Ways to lay a model out on a grid, and whether the tensor axis is the outer one."""
    if tensor == 1:
        yield "data", False
    if stages == 1 and data * tensor > 1 and (tensor == 1 or data > 1):  # one axis has no two names
        yield "free", False
    if tensor == 1 or not facts.linears.rows:
        return
    for outer in (False, True) if data > 1 else (False,):
        yield "columns", outer
        if facts.positions:
            yield "sequence", outer


@cache
def divisors(number: int) -> Sequence[int]:
    """The divisors of a number, the least first; none of 0."""
    return tuple(each for each in range(1, number + 1) if number % each == 0)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]


def is_planned_as_is(base: Strategy) -> bool:
    """True if stages are fixed with their modules and ranks: what else there is, is planned as it stands."""
    return isinstance(base.stages, tuple) and bool(base.stages)


def fits(candidate: Candidate, base: Strategy) -> bool:
    """True if a candidate has the stages, micro-batches, schedule, shards, recompute and grid that were fixed.

    Raises:
        StrategyError: when something is fixed that no candidate can have.
    """
    return bool(with_fixed_entries(CandidateTable.of([candidate]), base)[0])


def with_fixed_entries(found: CandidateTable, base: Strategy) -> Mask:
    """The candidates that keep all fixed entries.

    Raises:
        StrategyError: when something is fixed that no candidate can have.
    """
    axis = zero_axis(base.zero)
    if axis is not None and axis > 1:
        raise StrategyError(
            f"fixed: candidates of the search have a data axis and a tensor axis, and ZeRO along axis {axis} "
            "is none of these; give it axis 0"
        )
    # A grid has the axis of the shards, and an axis for each SBP of what is said for every axis.
    mask: Mask = found.axes > (axis or 0)
    for count in _axes_said(base):
        mask &= found.axes == count
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
    mask &= (found.recompute == 0) | (not base.recompute)
    mask &= (found.offload == 0) | (not base.offload)
    if base.grid:
        grid = tuple(base.grid)
        mask &= np.fromiter((candidate.grid == grid for candidate in found), np.bool_, len(found))
    return mask


def _axes_said(base: Strategy) -> list[int]:
    entries = (getattr(base, name) for name in (*LAYOUTS, "signatures"))
    every = (said for entry in entries for said in entry.values())
    return sorted({len(said) for said in every if isinstance(said, tuple)})


def space_of(facts: StepFacts, every_rank: bool) -> CandidateTable:
    """The candidates of a step's space that keep what is fixed.

    Args:
        facts: of the step.
        every_rank: true if all ranks must take part.

    Raises:
        UserError: there is none.
    """
    base = facts.base
    for idle in (False, True):
        every = candidates(facts, every_rank, idle)
        mask = with_fixed_entries(every, base)
        if facts.statistics:
            mask &= every.micro_batches == base.micro_batches
        if mask.any():
            return every.where(mask)
    ranks_text = " or ".join(map(str, _ranks(facts, every_rank)))
    raise UserError(
        f"weft.search: no strategy on {ranks_text} {'rank' if ranks_text == '1' else 'ranks'} has all that is fixed"
        f"{_said(base)}: a grid has all of these ranks, stages divide them, the number of micro-batches divides the "
        f"{facts.samples} samples of a step, ZeRO needs its axis and several ranks along the data axis, layouts for "
        "several axes need a grid of as many; fix less, or take another size of batch or number of ranks"
    )


def _said(base: Strategy) -> str:
    """The entries of a base that leave candidates out, as text."""
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
