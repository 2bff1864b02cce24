"""Strategies that other processes plan ahead are what this one would have planned."""

from __future__ import annotations

import os
import signal
import struct
from collections.abc import Iterator
from multiprocessing import Pipe

import pytest

import weft
from search.jobs import decoder, layers
from weft.planning.machine import machine_of
from weft.search import planners as own
from weft.search.evaluator import UNBOUNDED, Evaluator, serve
from weft.search.measures import Measures, TooSlow, key_of
from weft.search.planners import PlannerQuestion, Planners, Setup
from weft.strategy.strategy import Strategy, data_parallel
from weft.units import Seconds

OTHER = Strategy(batch={"*": weft.split(0)}, parameters={"*": weft.broadcast}, zero=weft.Zero(3))


@pytest.fixture
def helped() -> Iterator[Evaluator]:
    """An evaluator with one process beside it, which has started."""
    with Planners(1) as planners:
        planners.worked(1e9)
        yield Evaluator(layers(), machine_of("h100x2"), (0, 1), planners=planners)


def test_answers_are_the_same(helped: Evaluator) -> None:
    alone = Evaluator(layers(), machine_of("h100x2"), (0, 1))
    assert helped.ahead(OTHER)
    assert not helped.ahead(data_parallel())  # it has no time
    assert helped.of(data_parallel()) == alone.of(data_parallel())
    assert helped.last(data_parallel()) is not None
    assert helped.of(OTHER) == alone.of(OTHER)
    assert helped.last(OTHER) is None
    assert helped.took(OTHER) > 0
    refused = Strategy(parameters={"nothing": weft.broadcast})
    assert helped.ahead(refused)
    assert helped.of(refused) == alone.of(refused)


def test_what_is_longer_than_was_asked_is_planned_again_where_more_is_asked(
    helped: Evaluator,
) -> None:
    answer = Evaluator(layers(), machine_of("h100x2"), (0, 1)).of(OTHER)
    assert isinstance(answer, Measures)
    short = Seconds(answer.seconds / 100)
    assert helped.ahead(OTHER, short)
    assert isinstance(helped.within(OTHER, short), TooSlow)
    assert helped.last(OTHER) is None
    assert helped.ahead(OTHER, Seconds(2 * short))
    assert helped.of(OTHER) == answer
    assert helped.last(OTHER) is not None  # it was planned here


def test_a_process_that_ends_is_done_without(helped: Evaluator) -> None:
    """Before it answers, and before it is asked."""
    (planner,) = helped.planners._every
    assert helped.ahead(OTHER)
    os.kill(planner._process.pid, signal.SIGKILL)
    planner._process.wait()
    assert isinstance(helped.of(OTHER), Measures)
    assert not helped.ahead(data_parallel())
    assert isinstance(helped.of(data_parallel()), Measures)


def test_none_is_left_at_the_end() -> None:
    with Planners(2) as planners:
        planners.worked(1e9)
        every = [each._process for each in planners._every]
        assert len(every) == 2
    assert all(each.returncode == -signal.SIGKILL for each in every)
    planners.worked(1e9)
    assert not planners.has_time()


@pytest.mark.parametrize("more", [-1, 0])
def test_of_a_large_step_they_start_at_once(more: int) -> None:
    with Planners(1) as planners:
        planners.begin(own.LARGE + more)
        assert planners.has_time() == (more == 0)


def test_a_process_ends_quietly_with_its_search() -> None:
    """Killed while it plans, while it waits, and in the middle of a question."""
    ours, theirs = Pipe()
    ours.send(Setup("whole", layers(), machine_of("h100x2"), (0, 1), None))
    ours.send(PlannerQuestion("whole", OTHER, UNBOUNDED))
    ours.close()
    serve(theirs)
    ours, theirs = Pipe()
    ours.close()
    serve(theirs)
    ours, theirs = Pipe()
    os.write(ours.fileno(), struct.pack("!i", 100) + b"half")
    ours.close()
    serve(theirs)


@pytest.mark.thorough
def test_a_search_finds_the_same_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """They start at the first plan here."""
    alone = weft.search(decoder(), "h100x2", moves=6, seed=3, planners=0)
    asked, ask = [], Planners.ask

    def noted(self: Planners, *arguments: object) -> None:
        asked.append(arguments)
        ask(self, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(Planners, "ask", noted)
    monkeypatch.setattr(own, "WORTH", 0.0)
    assert weft.search(decoder(), "h100x2", moves=6, seed=3, planners=1) == alone
    assert asked


def test_keys_are_of_the_text() -> None:
    assert key_of(OTHER) == key_of(Strategy.from_text(OTHER.to_text(), "text"))
    assert key_of(OTHER) != key_of(data_parallel())
