"""A search that begins with an earlier one plans what that one did not."""

from __future__ import annotations

import pytest

import weft
from search.jobs import decoder, layers
from weft.compiler.pipeline import Compiled
from weft.errors import UserError
from weft.planning.plans import PricedStep
from weft.search import evaluator
from weft.strategy.strategy import Strategy


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Strategy]:
    """The strategies that were planned."""
    made: list[Strategy] = []
    before = evaluator.Evaluator._priced

    def noted(self: evaluator.Evaluator, strategy: Strategy) -> tuple[Compiled, PricedStep]:
        made.append(strategy)
        return before(self, strategy)

    monkeypatch.setattr(evaluator.Evaluator, "_priced", noted)
    return made


def test_it_plans_nothing_twice(plans: list[Strategy]) -> None:
    first = weft.search(layers(), "h100x4", moves=20)
    seen = set(map(str, plans))
    plans.clear()
    second = weft.search(layers(), "h100x4", moves=20, start=first)
    # The simulation of the result alone is made again.
    assert seen & set(map(str, plans)) <= {str(second.best)}
    assert 0 < len(plans) <= 20 + 1
    assert second.seconds <= first.seconds
    assert second.bound == first.bound


@pytest.mark.thorough
def test_the_whole_is_known_after_two_halves() -> None:
    """Moves count strategies that are new, so a search in parts finds what one in a piece finds."""
    whole = weft.search(layers(), "h100x2", moves=400, seed=1)
    half = weft.search(layers(), "h100x2", moves=4, seed=1)
    rest = weft.search(layers(), "h100x2", moves=400, seed=1, start=half)
    assert (rest.seconds, rest.bound) == (whole.seconds, whole.bound)


@pytest.mark.thorough
def test_a_pin_skips_what_was_far_slower(plans: list[Strategy]) -> None:
    """Its candidates are not planned again; those near the best are, with the pin."""
    first = weft.search(decoder(), "h100x4", moves=12)
    pin = Strategy(parameters={"head.weight": weft.broadcast})
    plans.clear()
    second = weft.search(decoder(), "h100x4", moves=12, fixed=pin, start=first)
    assert second.best.parameters["head.weight"] == weft.broadcast
    assert all(each.parameters["head.weight"] == weft.broadcast for each in plans)
    assert any("something else fixed" in why for why in second.skipped)
    cold = weft.search(decoder(), "h100x4", moves=12, fixed=pin)
    assert second.seconds <= cold.seconds


def test_of_another_machine_the_strategy_alone_counts() -> None:
    first = weft.search(layers(), "h100x2", moves=10)
    other = weft.search(layers(), "flexflow-k80x4", moves=10, start=first)
    assert other.seconds <= weft.simulate(layers(), first.best, "flexflow-k80x4").step_seconds
    cold = weft.search(layers(), "flexflow-k80x4", moves=10, start=first.best)
    assert (other.seconds, other.bound) == (cold.seconds, cold.bound)


def test_a_start_that_is_refused_takes_no_move() -> None:
    """One strategy is planned in any case, as without it."""
    start = Strategy(batch={"*": weft.split(0)}, grid=(64,))
    found = weft.search(layers(), "h100x2", moves=1, start=start, planners=0)
    cold = weft.search(layers(), "h100x2", moves=1, planners=0)
    assert (str(found.best), found.tried) == (str(cold.best), cold.tried)
    assert any(why.startswith("the start is refused: the grid 64 has 64") for why in found.skipped)


@pytest.mark.parametrize("argument", ["fixed", "start"])
def test_what_is_no_strategy_is_told(argument: str) -> None:
    with pytest.raises(UserError, match=rf"weft\.search: {argument} must be a weft\.Strategy"):
        weft.search(layers(), "h100x2", moves=1, **{argument: "best.yaml"})  # type: ignore[arg-type]
