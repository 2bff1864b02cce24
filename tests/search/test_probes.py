"""Lines through two small steps."""

from __future__ import annotations

from typing import Any

import pytest

from search.jobs import begun, decoder
from weft.search.candidate import Candidate
from weft.search.evaluator import Probes
from weft.search.measures import Measures, Unplannable
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds


class Small:
    """An evaluator of a small step that is known."""

    def __init__(self, answer: Measures | Unplannable) -> None:
        self.answer = answer

    def ahead(self, strategy: Strategy) -> bool:
        return True

    def of(self, strategy: Strategy) -> Measures | Unplannable:
        return self.answer


def measures(seconds: float, of_micro_batch: int, of_step: int) -> Measures:
    memory = Bytes(max(of_micro_batch, of_step))
    parts = Bytes(of_micro_batch), Bytes(of_step)
    return Measures(Seconds(seconds), memory, Seconds(0.0), Seconds(0.0), parts)


def along(few: Measures | Unplannable, more: Measures | Unplannable) -> object:
    """The answer for a step of 8 blocks, through those of 3 and 4."""
    search = begun(decoder(8), "h100x2")
    small: Any = (Small(few), Small(more))
    return Probes(search.facts, search.evaluator, small).of(Strategy())


def test_what_micro_batches_and_the_rest_hold_grow_on_lines_of_their_own() -> None:
    """Of three blocks an update holds the most, of four a micro-batch: that goes on."""
    found = along(measures(1.0, 900, 1000), measures(1.5, 1200, 1010))
    assert isinstance(found, Measures)
    assert found.seconds == 1.0 + 5 * 0.5
    assert found.memory == 900 + 5 * 300


def test_nothing_is_less_than_that_of_few_blocks() -> None:
    found = along(measures(1.0, 900, 1000), measures(0.5, 800, 990))
    assert isinstance(found, Measures)
    assert (found.seconds, found.memory) == (1.0, 1000)


def test_what_cannot_be_planned_has_no_line() -> None:
    why = Unplannable("not so")
    assert along(why, measures(1.0, 1, 1)) == why
    assert along(measures(1.0, 1, 1), why) == why


@pytest.mark.parametrize("zero", [0, 1, 3])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_lines_meet_the_whole_step(zero: int, micro_batches: int) -> None:
    search = begun(decoder(8), "h100x2")
    strategy = search.strategy(Candidate(2, zero=zero, micro_batches=micro_batches))
    line, whole = (
        Probes(search.facts, search.evaluator).of(strategy),
        search.evaluator.of(strategy),
    )
    assert isinstance(line, Measures)
    assert isinstance(whole, Measures)
    reserve = search.lower_bounds.reserve
    assert line.seconds == pytest.approx(whole.seconds, rel=0.03)
    assert line.memory - reserve == pytest.approx(whole.memory - reserve, rel=0.03)
