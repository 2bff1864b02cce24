"""Moves of time and memory, also of micro-batches in flight: one more or less in one stage, as planned now."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache
from random import Random
from typing import Any, final

import pytest
import torch

import weft
from models import GPT, token_batch, token_loss
from search.jobs import begun
from weft.planning.stored_step import StoredStep
from weft.search.budget import Budget
from weft.search.measures import Measures
from weft.search.moves.local_search import improve
from weft.search.moves.neighbours import Neighbours, in_flight_moves, memory_moves, time_moves
from weft.search.moves.sequences import StrategyMove
from weft.search.state import SearchState
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


@cache
def step() -> StoredStep:
    with torch.device("meta"):
        model, batch = GPT(2000, 256, 4, 4, 64), token_batch(32, 64, 2000)
    return weft.Job(model, token_loss, torch.optim.AdamW(model.parameters()), batch).stored()


def pipeline(**fields: Any) -> Strategy:
    """Two stages of eight micro-batches."""
    return Strategy(
        batch={"*": weft.split(0)},
        parameters={"*": weft.broadcast},
        **{"stages": 2, "micro_batches": 8, "schedule": "zero_bubble", "grid": (2,), **fields},
    )


def given(moves: Iterable[StrategyMove], strategy: Strategy) -> set[object]:
    return {move.on(strategy).in_flight for move in moves}


def test_one_more_or_less_in_one_stage() -> None:
    start = pipeline(in_flight=(8, 1))
    found = list(in_flight_moves(start, Strategy(), (8, 1)))
    assert given(found, start) == {None, (7, 1), (8, 2)}
    assert not list(in_flight_moves(start, Strategy(in_flight=(8, 1)), (8, 1)))
    assert not list(in_flight_moves(Strategy(), Strategy(), (1,)))


def test_half_of_1f1b_and_some_more_in_several_stages() -> None:
    start = pipeline(stages=4, micro_batches=4)
    moves = in_flight_moves(start, Strategy(), (4, 4, 4, 4))
    halves = {move.on(start).in_flight for move in moves if "half" in move.name}
    assert halves == {(3, 2, 2, 1), (4, 3, 3, 2), (4, 4, 4, 3)}


def test_other_stages_and_schedules_have_their_own() -> None:
    start = pipeline(in_flight=(8, 1), grid=(4,))
    by_name = {move.name: move.on(start) for move in time_moves(start, Strategy(), 8)}
    assert by_name["4 stages"].in_flight is None
    assert by_name["2 stages"].in_flight == (8, 1)
    assert by_name["schedule gpipe"].in_flight is None
    assert by_name["4 micro-batches"].in_flight == (8, 1)
    base = Strategy(in_flight=(8, 1))
    fixed = {move.name: move.on(start) for move in time_moves(start, base, 8)}
    assert fixed["schedule gpipe"].in_flight == (8, 1)


def neighbours(strategy: Strategy) -> set[object]:
    moves = Neighbours(begun(step(), "flexflow-k80x2")).every(strategy)
    return given(moves, strategy) - {strategy.in_flight}


def test_the_search_reads_what_is_planned() -> None:
    assert neighbours(pipeline()) == {(1, 2), (3, 2), (2, 1), (2, 3)}
    assert neighbours(pipeline(schedule="1f1b")) == {(1, 1), (3, 1), (2, 2)}
    assert neighbours(pipeline(in_flight=(9, 4))) == {None, (7, 4), (8, 3), (8, 5)}
    assert neighbours(Strategy(grid=(2,))) == set()


@final
class OnlyInFlight:
    """The moves of micro-batches in flight alone."""

    def __init__(self, found: SearchState) -> None:
        self._all = Neighbours(found)

    def every(self, strategy: Strategy) -> list[StrategyMove]:
        """All of them."""
        return [move for move in self._all.every(strategy) if "in flight" in move.name]

    def cuts(self, _: Strategy) -> Iterator[StrategyMove]:
        """None of them makes stages."""
        return iter(())

    def drawn(self, random: Random, strategy: Strategy) -> StrategyMove:
        """One of them."""
        return random.choice(self.every(strategy))


def descended(limit: int) -> tuple[tuple[int, ...], Measures]:
    """From one micro-batch at a time, which is what has room in any case."""
    found = begun(step(), "flexflow-k80x2", limit)
    found.budget = Budget.of(1.0, 30)
    found.log.plan("one at a time", pipeline(in_flight=(1, 1)))
    improve(found, 0, OnlyInFlight(found))
    assert found.best is not None
    assert found.best[1].in_flight is not None
    return tuple(found.best[1].in_flight), found.best[2]


@pytest.mark.thorough
def test_as_many_as_there_is_room_for() -> None:
    """Under a limit below what the schedule takes there is room for a second micro-batch in the first stage alone."""
    evaluator = begun(step(), "flexflow-k80x2").evaluator
    usual, one = evaluator.of(pipeline()), evaluator.of(pipeline(in_flight=(1, 1)))
    assert isinstance(usual, Measures)
    assert isinstance(one, Measures)
    limit = usual.memory - 5_000_000
    found, took = descended(limit)
    assert found == (2, 1)
    assert took.memory <= limit
    assert took.seconds < 0.75 * one.seconds
    more, quicker = descended(usual.memory + 30_000_000)
    assert sum(more) > 4
    assert quicker.seconds < usual.seconds
