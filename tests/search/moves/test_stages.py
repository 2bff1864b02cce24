"""Stages with names, and modules that cross their borders."""

from __future__ import annotations

from dataclasses import replace

from search.jobs import begun, decoder
from weft.search.measures import Measures
from weft.search.moves.stages import border_moves, with_named_stages
from weft.search.steps.repeated import repeated_blocks
from weft.strategy.strategy import Strategy, data_parallel


def test_stages_get_names_and_borders_move_both_ways() -> None:
    evaluator = begun(decoder(), "h100x2").evaluator
    start = replace(data_parallel(), stages=2, micro_batches=2, grid=(2,))
    compiled = evaluator.compiled(start)
    named = with_named_stages(start, compiled, repeated_blocks(decoder().modules))
    assert named is not None
    assert isinstance(evaluator.of(named), Measures)
    moves = list(border_moves(named))
    assert len(moves) == 2
    there = moves[0].on(named)
    assert there != named
    assert isinstance(evaluator.of(there), Measures)
    back = next(move for move in border_moves(there) if move.name.endswith("stage 0"))
    assert back.on(there) == named


def test_numbers_have_no_borders() -> None:
    assert not list(border_moves(Strategy(stages=2)))
