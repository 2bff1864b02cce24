"""Moves of time and memory."""

from __future__ import annotations

import weft
from weft.search.moves.time_and_memory import memory_moves, time_moves
from weft.search.steps.repeated import Blocks
from weft.strategy.strategy import Strategy

BLOCKS = Blocks("blocks", 4)


def test_micro_batches_schedules_and_stages() -> None:
    start = Strategy(grid=(4,), stages=2, micro_batches=2, schedule="gpipe")
    found = [move.on(start) for move in time_moves(start, Strategy(), 12)]
    assert {each.micro_batches for each in found} == {1, 2, 3, 4, 6, 12}
    assert {each.schedule for each in found} == {
        None,
        "gpipe",
        "1f1b",
        "interleaved",
        "zero_bubble",
    }
    assert {each.stages for each in found} == {(), 2, 4}
    assert not list(time_moves(start, start, 12))


def test_zero_and_blocks_that_run_again_or_wait_on_the_host() -> None:
    start = Strategy(grid=(2, 2))
    moves = list(memory_moves(start, Strategy(), BLOCKS))
    found = [move.on(start) for move in moves]
    assert {each.zero for each in found if each.zero} == {
        weft.Zero(level, axis) for level in (1, 2, 3) for axis in (0, 1)
    }
    for entry in ("recompute", "offload"):
        sizes = {len(getattr(each, entry)) for each in found}
        assert sizes == {0, 1, 2, 4}
    fixed = Strategy(zero=weft.Zero(1), recompute=("blocks.0",), offload=("blocks.1",))
    assert not list(memory_moves(start, fixed, BLOCKS))


def test_a_block_is_taken_out_of_a_pattern() -> None:
    start = Strategy(recompute=("blocks.*",))
    move = next(
        m for m in memory_moves(start, Strategy(), BLOCKS) if "recompute blocks.2" in m.name
    )
    once = move.on(start)
    assert once.recompute == ("blocks.0", "blocks.1", "blocks.3")
    assert len(move.on(once).recompute) == 4
