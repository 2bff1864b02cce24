"""Moves of time and memory: micro-batches, also those in flight, schedules, stages, ZeRO, recomputation, offload."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft.search.moves.sequences import StrategyMove
from weft.search.space.fixed import with_fitting_in_flight
from weft.search.space.space import divisors
from weft.search.steps.repeated import Blocks
from weft.strategy.parts import SCHEDULES, Zero
from weft.strategy.stages import stage_count
from weft.strategy.strategy import Strategy

# Micro-batches in flight beside half of 1F1B's: where ranks take turns between stages and gradients of weights are put
# off, plans with so few are about as quick as interleaved ones and hold less (docs/results/search.md).
_MORE = (1, 2, 3)


def time_moves(strategy: Strategy, base: Strategy, samples: int) -> Iterator[StrategyMove]:
    """Other micro-batches, schedules and numbers of stages.

    Args:
        strategy: to move from.
        base: entries that hold for every strategy.
        samples: of the batch; 0 where it cannot be cut.
    """
    if base.micro_batches == 1:
        for count in divisors(samples):
            if count != strategy.micro_batches:
                yield _entry(f"{count} micro-batches", "micro_batches", count)
    if base.schedule is None and stage_count(strategy) > 1:
        # With the micro-batches in flight that it gives.
        own = {} if base.in_flight is not None else {"in_flight": None}
        yield _entry("computed schedule", "schedule", None, **own)
        for schedule in SCHEDULES:
            yield _entry(f"schedule {schedule}", "schedule", schedule, **own)
    if strategy.grid and not base.stages and isinstance(strategy.stages or 1, int):
        for count in divisors(strategy.grid[0]):
            found = {"stages": count if count > 1 else ()}
            yield StrategyMove(f"{count} stages", partial(_staged, found, base))


def in_flight_moves(
    strategy: Strategy, base: Strategy, counts: Sequence[int]
) -> Iterator[StrategyMove]:
    """One micro-batch more or less in flight in one stage; as many as the schedule gives; about half of 1F1B's.

    Args:
        strategy: to move from.
        base: entries that hold for every strategy.
        counts: for each stage, the micro-batches that are in flight there now; one stage has no such moves.
    """
    if base.in_flight is not None or len(counts) < 2:
        return
    yield _entry("in flight as scheduled", "in_flight", None)
    for more in _MORE if len(counts) > 2 else ():
        half = half_in_flight(len(counts), more, strategy.micro_batches)
        yield _entry(f"half of 1F1B's and {more} more in flight", "in_flight", half)
    for stage, count in enumerate(counts):
        for other in (count - 1, count + 1):
            if 1 <= other <= strategy.micro_batches:
                every = (*counts[:stage], other, *counts[stage + 1 :])
                yield _entry(f"{other} in flight in stage {stage}", "in_flight", every)


def half_in_flight(stages: int, more: int, micro_batches: int) -> tuple[int, ...]:
    """For each stage half of the micro-batches that 1F1B has in flight, and so many more, as far as there are."""
    return tuple(min((stages - stage) // 2 + more, micro_batches) for stage in range(stages))


def memory_moves(
    strategy: Strategy, base: Strategy, blocks: Blocks | None
) -> Iterator[StrategyMove]:
    """Other levels of ZeRO along each axis; recomputation and offload of all blocks, of half of them, and of each.

    Args:
        strategy: to move from.
        base: entries that hold for every strategy.
        blocks: that come again; without any, all modules together are one.
    """
    if base.zero is None:
        yield _entry("no ZeRO", "zero", None)
        for axis in range(max(len(strategy.grid), 1)):
            for level in (1, 2, 3):
                yield _entry(f"ZeRO {level} along axis {axis}", "zero", Zero(level, axis))
    for entry in ("recompute", "offload"):
        if not getattr(base, entry):
            yield _entry(f"{entry} nothing", entry, ())
            for name, patterns in _parts(blocks):
                yield _entry(f"{entry} {name}", entry, patterns)
            for number in range(blocks.count if blocks is not None else 0):
                assert blocks is not None
                path = blocks.path(number)
                every = tuple(map(blocks.path, range(blocks.count)))
                yield StrategyMove(
                    f"{entry} {path}, or no more", partial(_toggled, entry, path, every)
                )


def _parts(blocks: Blocks | None) -> Iterator[tuple[str, Sequence[str]]]:
    """All blocks, and the first and the last half of them."""
    if blocks is None:
        yield "all", ("*",)
        return
    every = tuple(map(blocks.path, range(blocks.count)))
    half = blocks.count // 2
    yield "all blocks", every
    yield "the first half of the blocks", every[:half]
    yield "the last half of the blocks", every[half:]


def _entry(name: str, entry: str, value: Any, **others: Any) -> StrategyMove:
    return StrategyMove(name, partial(_with, {entry: value, **others}))


def _with(entries: Mapping[str, Any], strategy: Strategy) -> Strategy:
    return replace(strategy, **entries)


def _staged(entries: Mapping[str, Any], base: Strategy, strategy: Strategy) -> Strategy:
    return with_fitting_in_flight(_with(entries, strategy), base)


def _toggled(entry: str, path: str, every: Sequence[str], strategy: Strategy) -> Strategy:
    """A block more or less; a pattern for all becomes their names."""
    held = getattr(strategy, entry)
    named = set(every) if any("*" in pattern for pattern in held) else set(held)
    changed: dict[str, Any] = {entry: tuple(each for each in every if each in named ^ {path})}
    return replace(strategy, **changed)
