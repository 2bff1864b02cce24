"""The pieces of a trace on rows written by hand: parts of a step, late ranks, clocks, needs."""

from __future__ import annotations

import dataclasses

import pytest

from build import register
from weft.actors.dependencies import ActKey, Dependency, dependencies, dependencies_in_step
from weft.ir.plan import Compute, Feed, Hold, RankPlan
from weft.program.inspect.trace import ahead, with_late_ranks
from weft.traces.events import trace_events
from weft.traces.rows import Arrow, Kind, Level, RankTrace, Slice, StepSpan, parts

MS = 1_000_000
QUEUES = (("compute", ()), ("comm:0", (0, 1)))


def each(queue: str, kind: Kind, begin: int, end: int, meeting: str = "") -> Slice:
    peers = (1,) if meeting else ()
    return Slice(queue, f"{kind} {begin}", kind, begin * MS, end * MS, {}, meeting, peers)


def rank(number: int, *slices: Slice) -> RankTrace:
    peers = {0: (1,), 1: (0,)}[number]
    rows = tuple(s._replace(peers=peers) if s.meeting else s for s in slices)
    return RankTrace(number, QUEUES, (StepSpan(0, 0, 20 * MS),), rows)


FIRST = rank(
    0,
    each("compute", "compute", 1, 5),
    each("compute", "compute", 7, 9),
    each("compute", "compute", 15, 18),
    each("comm:0", "communication", 4, 8, "a"),
    each("comm:0", "communication", 10, 14, "b"),
)
SECOND = rank(
    1,
    each("compute", "compute", 0, 6),
    each("comm:0", "communication", 6, 8, "a"),
    each("comm:0", "communication", 12, 14, "b"),
)


def test_what_is_not_beside_compute_is_exposed() -> None:
    found = parts(with_late_ranks((FIRST, SECOND))[0])
    assert found.step == pytest.approx(0.020)
    assert found.compute == pytest.approx(0.009)
    assert found.communication == pytest.approx(0.008)
    assert found.exposed == pytest.approx(0.006)  # 5 to 7 and 10 to 14
    assert found.hidden == pytest.approx(0.002)
    assert found.late == pytest.approx(0.003)  # 5 to 6 and 10 to 12
    assert found.idle == pytest.approx(0.005)  # 0 to 1, 9 to 10, 14 to 15, 18 to 20


def test_parts_are_means_over_steps() -> None:
    twice = dataclasses.replace(
        FIRST, steps=(StepSpan(0, 0, 10 * MS), StepSpan(1, 10 * MS, 20 * MS))
    )
    assert parts(twice).step == pytest.approx(0.010)
    assert parts(twice).compute == pytest.approx(0.0045)


def test_communications_wait_for_the_rank_that_begins_last() -> None:
    first, second = with_late_ranks((FIRST, SECOND))
    waits = [(s.name, s.begin // MS, s.end // MS) for s in first.slices if s.kind == "wait"]
    assert waits == [("waits for rank 1 to begin", 4, 6), ("waits for rank 1 to begin", 10, 12)]
    assert second.slices == SECOND.slices


def test_a_rank_that_begins_after_the_end_was_not_waited_for() -> None:
    sender = rank(0, each("comm:0", "communication", 1, 2, "a"))
    reader = rank(1, each("comm:0", "communication", 3, 4, "a"))
    assert with_late_ranks((sender, reader)) == (sender, reader)


def test_text_is_read_back() -> None:
    trace = dataclasses.replace(
        FIRST, arrows=(Arrow("x", "compute", "comm:0", 3, 4),), levels=(Level(5, 1024),)
    )
    assert RankTrace.of(trace.text()) == trace
    assert trace.moved(-7).moved(7) == trace
    assert trace.moved(MS).slices[0].begin == 0


def test_clocks_of_one_host_are_left_alone() -> None:
    assert ahead([(0, 10), (20, 31)], [(2, 11), (19, 30)]) == 0


def test_the_clock_of_another_host_is_bounded_from_both_sides() -> None:
    first = [(0, 10), (20, 24)]
    # 1000 ahead; entered at 3 and 21, left at 9 and 25 on the first rank's clock.
    assert ahead([(1003, 1009), (1021, 1025)], first) == pytest.approx(1000, abs=4)


def test_events_begin_at_the_first_step() -> None:
    moved = (FIRST.moved(-5 * MS), SECOND.moved(-5 * MS))
    events = [event for event in trace_events(moved) if event["ph"] == "X"]
    assert min(event["ts"] for event in events) == 0.0
    assert events[0]["ts"] == 1000.0
    assert events[0]["dur"] == 4000.0


def test_needs_count_versions_and_copies() -> None:
    """A feed of rate 1, a loop of 4 acts that reads it and a weight, and an update of the weight."""
    plan = RankPlan(
        0,
        (),
        (
            Hold(0, ("constant",)),
            Feed(1, ("x",), ("x",)),
            Compute(2, (), ("x", "w", "constant"), ("y", "sum"), acts=4),
            Compute(3, (), ("y",), (), acts=4),
            Compute(4, (), ("sum",), ("w",)),
        ),
        (
            register("constant", 0, 2, full=True),
            register("x", 1, 2, credits=1),
            register("w", 4, 2, full=True),
            register("y", 2, 3, rate=4, credits=2),
            register("sum", 2, 4),
        ),
        micro_batches=4,
    )

    def of(actor: int, number: int) -> set[tuple[str, int, int, bool]]:
        found: list[Dependency] = list(dependencies(plan, ActKey(actor, number)))
        assert len(set(found)) == len(found)
        return {(name, *act, copy) for name, act, copy in found}

    assert of(1, 0) == set()
    assert of(2, 0) == {("x", 1, 0, False)}
    # Micro-batch 2 of step 0 needs a copy of y: that of version 0.
    assert of(2, 2) == {("x", 1, 0, False), ("y", 3, 0, True)}
    # Step 1 needs the update of step 0, the next feed, and the copy of the sum.
    assert of(2, 4) == {
        ("x", 1, 1, False),
        ("w", 4, 0, False),
        ("y", 3, 2, True),
        ("sum", 4, 0, True),
    }
    assert of(4, 0) == {("sum", 2, 3, False), ("w", 2, 3, True)}
    assert of(1, 1) == {("x", 2, 3, True)}
    assert of(3, 5) == {("y", 2, 5, False)}
    found = dependencies_in_step(plan)
    assert set(found[2, 2]) == {(1, 0), (3, 0)}
    assert found[4, 0] == ((2, 3),)
    assert found[1, 0] == ()
