"""The local search: what it finds is quicker, none of its moves improves it, and equal seeds find equal strategies."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from random import Random
from typing import final

import pytest

from search.jobs import begun, layers
from weft.search.budget import Budget
from weft.search.measures import Measures, TooSlow
from weft.search.moves import local_search as module
from weft.search.moves.local_search import LocalSearch, improve
from weft.search.moves.sequences import StrategyMove
from weft.search.state import SearchState
from weft.strategy.strategy import Strategy, data_parallel
from weft.units import Seconds

SLOW = replace(
    data_parallel(),
    grid=(2,),
    signatures={"relu": "B -> B", "addmm": "B, B, B -> B"},
    micro_batches=4,
)


def searched(seed: int, moves: int) -> SearchState:
    found = begun(layers(), "flexflow-k80x2")
    found.budget = Budget.of(1.0, moves)
    found.log.plan("slow", SLOW)
    improve(found, seed)
    return found


def test_nothing_is_tried_beyond_the_budget_and_equal_seeds_give_equal_results() -> None:
    one, two = searched(3, 15), searched(3, 15)
    assert one.planned <= 15
    assert one.best == two.best
    assert one.best is not None
    first = one.evaluator.of(SLOW)
    assert isinstance(first, Measures)
    assert one.best[2].seconds < first.seconds
    assert "not all of" in one.log.locality
    assert one.log.locality in str(one.result())


@final
class Few:
    """Moves of two entries: eight strategies, so that all pairs are tried."""

    def every(self, _: Strategy) -> list[StrategyMove]:
        """Four numbers of micro-batches, and two signatures of one call."""
        return [
            *(StrategyMove(f"{count}", partial(_cut, count)) for count in (1, 2, 4, 8)),
            *(StrategyMove(text, partial(_signed, text)) for text in ("B -> B", "S(0) -> S(0)")),
        ]

    def cuts(self, _: Strategy) -> Iterator[StrategyMove]:
        """None of them makes stages."""
        return iter(())

    def drawn(self, random: Random, strategy: Strategy) -> StrategyMove:
        """One of them."""
        return random.choice(self.every(strategy))


def _cut(count: int, strategy: Strategy) -> Strategy:
    return replace(strategy, micro_batches=count)


def _signed(text: str, strategy: Strategy) -> Strategy:
    return replace(strategy, signatures={"relu": text})


def test_a_local_optimum_is_one() -> None:
    """Whatever it says was tried is tried again here, by full plans."""
    found = begun(layers(), "flexflow-k80x2")
    found.log.plan("slow", _signed("B -> B", _cut(8, replace(data_parallel(), grid=(2,)))))
    improve(found, 0, Few())
    assert found.log.locality.startswith("none of ")
    assert "nor any of " in found.log.locality
    assert found.best is not None
    _, strategy, best = found.best
    assert strategy.micro_batches == 1
    for one in Few().every(strategy):
        for two in Few().every(strategy):
            answer = found.evaluator.of(two.on(one.on(strategy)))
            if isinstance(answer, Measures):  # some layouts refuse a signature
                assert answer.seconds >= best.seconds, (one.name, two.name)


def test_the_quickest_pipeline_is_improved_beside_a_best_that_is_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A simulation errs about all pipelines alike: the best with stages, and without, are worth a real run."""
    monkeypatch.setattr(module, "NEAR_STAGED", 9.0)
    found = begun(layers(), "flexflow-k80x2")
    found.log.plan("flat", replace(data_parallel(), grid=(2,)))
    found.log.plan("staged", replace(data_parallel(), grid=(2,), stages=2, micro_batches=8))
    improve(found, 0, Few())
    tried = [each.strategy for each in found.result().tried]
    assert any(each.stages == 2 and each.micro_batches == 1 for each in tried)


def test_moves_are_named_by_what_they_go_on_from() -> None:
    """Not by the best so far, from which they may be far."""
    found = begun(layers(), "flexflow-k80x2")
    strategy = _cut(8, replace(data_parallel(), grid=(2,)))
    found.log.plan("best", strategy)
    assert found.best is not None
    search = LocalSearch(found, Random(0), Few())
    search.descend("far away; 3 stages", strategy, found.best[2])
    assert found.best[0].startswith("far away; ")


def test_what_takes_longer_is_not_measured() -> None:
    evaluator = begun(layers(), "flexflow-k80x2").evaluator
    strategy = replace(data_parallel(), grid=(2,))
    least = evaluator.within(strategy, Seconds(1e-9))
    assert isinstance(least, TooSlow)
    whole = evaluator.within(strategy, Seconds(1.0))
    assert isinstance(whole, Measures)
    assert least.seconds <= whole.seconds
    assert whole == evaluator.of(strategy)
    # What is known by then is given, however little was asked for.
    assert evaluator.within(Strategy(grid=(3,)), Seconds(1.0)) == evaluator.of(Strategy(grid=(3,)))
