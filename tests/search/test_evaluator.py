"""The evaluator: strategies that cannot be planned are refused, and have no plans; other errors end the search."""

from __future__ import annotations

from dataclasses import replace

import pytest

import weft
from search.jobs import begun, layers
from weft.errors import InternalError
from weft.search import evaluator as module
from weft.search.measures import Measures, Unplannable

PLAIN = replace(weft.data_parallel(), grid=(2,))


def test_what_cannot_be_planned_has_no_plans_and_is_refused() -> None:
    evaluator = begun(layers(), "h100x2").evaluator
    assert evaluator.compiled_or_none(PLAIN) is not None
    assert isinstance(evaluator.of(PLAIN), Measures)
    larger = replace(PLAIN, grid=(3,))
    assert evaluator.compiled_or_none(larger) is None
    assert isinstance(evaluator.of(larger), Unplannable)


def test_a_plan_that_gets_stuck_is_one_strategy_fewer(monkeypatch: pytest.MonkeyPatch) -> None:
    def stuck(*_: object, **__: object) -> object:
        raise InternalError("stuck")

    evaluator = begun(layers(), "h100x2").evaluator
    monkeypatch.setattr(module, "plan_stored", stuck)
    assert evaluator.compiled_or_none(PLAIN) is None
    assert evaluator.of(PLAIN) == Unplannable("weft cannot plan it: stuck")


def test_any_other_error_is_one_of_the_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> object:
        raise ZeroDivisionError

    evaluator = begun(layers(), "h100x2").evaluator
    monkeypatch.setattr(module, "plan_stored", broken)
    for ask in (evaluator.compiled_or_none, evaluator.of):
        with pytest.raises(ZeroDivisionError):
            ask(PLAIN)
