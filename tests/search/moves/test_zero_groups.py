"""Moves of ZeRO for groups of parameters: one form for equal levels; they find what is known to be better."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random
from typing import final

import pytest
import torch

import weft
from models import GPT, token_batch, token_loss
from search.jobs import begun
from weft.planning.stored_step import StoredStep
from weft.search.budget import Budget
from weft.search.measures import Measures
from weft.search.moves.local_search import improve
from weft.search.moves.neighbours import Neighbours, ZeroMoves
from weft.search.moves.sequences import StrategyMove
from weft.search.state import SearchState
from weft.strategy.parts import Zeros, level_of, zero_rules
from weft.strategy.strategy import Strategy, data_parallel

Zero = weft.Zero
BASE = replace(data_parallel(), grid=(4,))


@cache
def tables() -> StoredStep:
    """Three narrow blocks between two tables that are most of the parameters."""
    with torch.device("meta"):
        model, batch = GPT(20_000, 64, 3, 4, 64), token_batch(8, 64, 20_000)
    return weft.Job(model, token_loss, torch.optim.AdamW(model.parameters()), batch).stored()


def moves() -> ZeroMoves:
    found = begun(tables(), "h100x4")
    return ZeroMoves(tables().graph, found.facts.blocks)


def moved(zero: Zeros | None, *words: str, micro_batches: int = 1) -> Zeros | None:
    strategy = replace(BASE, zero=zero, micro_batches=micro_batches)
    for each in words:
        by_name = {move.name: move for move in moves().moves(strategy, Strategy())}
        strategy = by_name[each].on(strategy)
    return strategy.zero


def test_groups_fold_over_blocks() -> None:
    groups = moves().groups
    assert list(groups)[:5] == [
        *("blocks", "all outside of blocks", "vectors", "tokens.weight", "head.weight")
    ]
    assert groups["blocks.*.up.weight"] == ("blocks.*.up.weight",)
    assert all(place.startswith("blocks.*.") for place in groups["blocks"])
    assert {"norm.bias", "blocks.*.norm1.weight", "blocks.*.up.bias"} <= set(groups["vectors"])
    assert not any(place.endswith("up.weight") for place in groups["vectors"])


def test_equal_levels_are_equal_strategies() -> None:
    up = "ZeRO 3 along axis 0 for "
    both = {"tokens.weight": Zero(3), "head.weight": Zero(3)}
    assert moved(None, f"{up}head.weight", f"{up}tokens.weight") == both
    one, two = (moved(None, *(up + name for name in names)) for names in _ORDERS)
    assert str(one) == str(two)
    assert moved(Zero(3), "ZeRO 0 along axis 0 for blocks", f"{up}blocks") == Zero(3)
    assert moved({"*": Zero(3)}, f"{up}blocks") == {"*": Zero(3)}  # as it is
    every = ("blocks", "all outside of blocks")
    assert moved(Zero(2), *(f"ZeRO 0 along axis 0 for {name}" for name in every)) is None


_ORDERS = (("head.weight", "tokens.weight"), ("tokens.weight", "head.weight"))


def test_levels_are_read_off_any_patterns() -> None:
    """Those of a user need not be the moves' own."""
    zero = {"blocks.*.up.*": Zero(1), "*.bias": None, "*": Zero(3)}
    found = moved(zero, "ZeRO 1 along axis 0 for tokens.weight")
    rules = zero_rules(found)
    levels = {
        "tokens.weight": 1,
        "blocks.2.up.bias": 1,
        "blocks.2.down.bias": 0,
        "norm.bias": 0,
        "head.weight": 3,
    }
    assert {name: level_of(rules, name) for name in levels} == levels


def test_what_is_fixed_is_not_moved_and_level_2_is_for_micro_batches() -> None:
    fixed = Strategy(zero={"*": None})
    assert not list(moves().moves(BASE, fixed))
    once = [move.name for move in moves().moves(BASE, Strategy())]
    again = [move.name for move in moves().moves(replace(BASE, micro_batches=2), Strategy())]
    assert not any(name.startswith("ZeRO 2") for name in once)
    assert any(name.startswith("ZeRO 2") for name in again)
    wide = [m.name for m in moves().moves(replace(BASE, grid=(1, 2, 2)), Strategy())]
    assert {name.split()[4] for name in wide} == {"1", "2"}


@final
class OnlyZero:
    """The moves of this module alone."""

    def every(self, strategy: Strategy) -> list[StrategyMove]:
        """All of them."""
        return list(moves().moves(strategy, Strategy()))

    def cuts(self, _: Strategy) -> Iterator[StrategyMove]:
        """None of them makes stages."""
        return iter(())

    def drawn(self, random: Random, strategy: Strategy) -> StrategyMove:
        """One of them."""
        return random.choice(self.every(strategy))


def descended(limit: int, count: int) -> tuple[SearchState, Strategy, Measures]:
    """From ZeRO 3, which fits."""
    found = begun(tables(), "h100x4", limit)
    found.budget = Budget.of(1.0, count)
    for level in (1, 3):
        found.log.plan(f"ZeRO {level}", replace(BASE, zero=Zero(level)))
    improve(found, 0, OnlyZero())
    assert found.best is not None
    assert found.best[2].memory <= limit
    return found, found.best[1], found.best[2]


def measured(found: SearchState, zero: Zeros | None) -> Measures:
    answer = found.evaluator.of(replace(BASE, zero=zero))
    assert isinstance(answer, Measures)
    return answer


def test_only_the_tables_are_sharded_where_that_suffices() -> None:
    """Whole parameters have no room, shards of all are slower: the blocks' many gathers are not needed."""
    found, best, took = descended(1_625_000_000, 20)
    assert measured(found, None).memory > 1_625_000_000
    for level in (1, 3):
        assert took.seconds < 0.96 * measured(found, Zero(level)).seconds
    rules = zero_rules(best.zero)
    assert level_of(rules, "tokens.weight") > 0
    assert level_of(rules, "blocks.0.up.weight") == 0


@pytest.mark.thorough
def test_many_small_vectors_are_left_whole() -> None:
    """Under a limit that ZeRO 1 does not keep, most vectors are cheaper whole than gathered."""
    limit = 1_619_000_000
    found, best, took = descended(limit, 24)
    assert measured(found, Zero(1)).memory > limit
    assert took.seconds < 0.98 * measured(found, Zero(3)).seconds
    rules = zero_rules(best.zero)
    small = ("blocks.0.norm1.bias", "blocks.0.attention.qkv.bias", "norm.weight")
    assert not any(level_of(rules, name) for name in small)
    assert all(level_of(rules, name) for name in ("tokens.weight", "blocks.0.up.weight"))


def test_they_are_moves_of_the_search() -> None:
    found = begun(tables(), "h100x4")
    names = [move.name for move in Neighbours(found).every(BASE)]
    assert "ZeRO 3 along axis 0 for blocks.*.up.weight" in names
    assert "ZeRO" not in names[0]
    # What is sharded may be more than there is need for.
    first = Neighbours(found).every(replace(BASE, zero=Zero(3)))[0]
    assert first.name == "ZeRO 0 along axis 0 for blocks"
