"""Moves of time and memory: micro-batches, schedules, numbers of stages, ZeRO, recomputation and offload."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from weft.search.moves.strategy_move import StrategyMove
from weft.search.steps.repeated import Blocks
from weft.strategy.parts import SCHEDULES, Zero
from weft.strategy.strategy import Strategy


def time_moves(strategy: Strategy, base: Strategy, samples: int) -> Iterator[StrategyMove]:
    """Other micro-batches, schedules and numbers of stages.

    Args:
        strategy: to move from.
        base: entries that hold for every strategy.
        samples: of the batch; 0 where it cannot be cut.
    """
    if base.micro_batches == 1:
        for count in range(1, samples + 1):
            if samples % count == 0 and count != strategy.micro_batches:
                yield _entry(f"{count} micro-batches", "micro_batches", count)
    stages = strategy.stages if isinstance(strategy.stages, int) else len(strategy.stages)
    if base.schedule is None and stages > 1:
        yield _entry("computed schedule", "schedule", None)
        for schedule in SCHEDULES:
            yield _entry(f"schedule {schedule}", "schedule", schedule)
    if strategy.grid and not base.stages and isinstance(strategy.stages or 1, int):
        for count in range(1, strategy.grid[0] + 1):
            if strategy.grid[0] % count == 0:
                yield _entry(f"{count} stages", "stages", count if count > 1 else ())


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


def _entry(name: str, entry: str, value: Any) -> StrategyMove:
    return StrategyMove(name, partial(_with, entry, value))


def _with(entry: str, value: Any, strategy: Strategy) -> Strategy:
    return replace(strategy, **{entry: value})


def _toggled(entry: str, path: str, every: Sequence[str], strategy: Strategy) -> Strategy:
    """A block more or less; a pattern for all becomes their names."""
    held = getattr(strategy, entry)
    named = set(every) if any("*" in pattern for pattern in held) else set(held)
    changed: dict[str, Any] = {entry: tuple(each for each in every if each in named ^ {path})}
    return replace(strategy, **changed)
