"""The result of a search as text and as JSON."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import weft
from search.jobs import layers
from weft.search.additive import AdditivePart
from weft.search.record import Learned, SearchRecord
from weft.search.result import SearchResult, Tried
from weft.search.why_not import WhyNot
from weft.simulator.simulation import Simulation
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

BEST = Strategy(micro_batches=2)
TRIED = (
    Tried("mine", BEST, "best", Seconds(0.125), Bytes(1_570_000_000)),
    Tried(
        "data 2",
        Strategy(),
        "slower",
        Seconds(0.25),
        Bytes(2 * 10**9),
        "125.000 ms more waiting",
        True,
    ),
    Tried("other", Strategy(micro_batches=3), "refused", None, None, "no such axis"),
)
TEXT = """\
best: mine: 125.000 ms a step
bound: no strategy of the space takes less than 100.000 ms, 20.0% below the best

  mine                                             125.000 ms     1.57 GB  best
* data 2                                           250.000 ms     2.00 GB  slower        125.000 ms more waiting
  other                                                                    refused       no such axis
  (*: strategies that people write by hand)
not planned: 2, not reached in time"""
MORE = """\
layouts: others in this grid save 25.00% of calls and boxing at most
"""
WHY = """\
  (*: strategies that people write by hand)

why not:
  data parallel  data 2                                           250.000 ms     2.00 GB  simulated  much slower

moves: none is quicker
not planned: 2, not reached in time
not searched: precision"""


@cache
def simulation() -> Simulation:
    """A step of 125 ms."""
    found = weft.simulate(layers(), weft.data_parallel(), "h100x2")
    return replace(found, step_seconds=Seconds(0.125))


def result(**entries: Any) -> SearchResult:
    """A result of three strategies."""
    skipped = {"not reached in time": 2, "no quicker": 0}
    record = SearchRecord(BEST, Strategy(), "step", "machine", Learned())
    given: dict[str, Any] = {"tried": TRIED, "skipped": skipped, "record": record, **entries}
    return SearchResult(BEST, simulation(), Seconds(0.1), **given)


def test_as_text_it_says_what_was_tried_and_what_was_not() -> None:
    assert str(result()) == TEXT


def test_all_that_is_known_stands_in_the_text() -> None:
    why = WhyNot(
        "data parallel", "data 2", "simulated", Seconds(0.25), Bytes(2 * 10**9), "much slower"
    )
    found = str(
        result(
            additive=AdditivePart(4.0, 3.0, BEST),
            why=(why,),
            locality="none is quicker",
            not_searched=("precision",),
        )
    )
    assert MORE in found
    assert found.endswith(WHY)


def test_of_many_rows_the_first_stand_in_the_text() -> None:
    found = str(result(tried=(*TRIED, *(replace(TRIED[2], name=f"row {n}") for n in range(25)))))
    assert "row 20" in found
    assert "row 21" not in found
    assert "  and 4 more\n" in found


def test_as_json_figures_are_there_and_strategies_are_not() -> None:
    found = result(additive=AdditivePart(4.0, 3.0, BEST)).to_json()
    assert set(found) == {
        *("simulation", "bound", "gap", "additive_gap", "tried", "skipped", "not_searched"),
        *("locality", "why"),
    }
    assert (found["bound"], round(found["gap"], 9), found["additive_gap"]) == (0.1, 0.2, 0.25)
    assert found["simulation"]["step_seconds"] == 0.125
    assert found["tried"][1] == {
        "name": "data 2",
        "outcome": "slower",
        "seconds": 0.25,
        "memory": 2 * 10**9,
        "why": "125.000 ms more waiting",
        "by_hand": True,
    }
    assert result().to_json()["additive_gap"] is None


def test_a_step_that_takes_no_time_has_no_gap() -> None:
    found = replace(result(), simulation=replace(simulation(), step_seconds=Seconds(0.0)))
    assert (found.seconds, found.gap) == (0.0, 0.0)
