"""Timelines in columns: on one clock, with totals by cause, and few slices of many."""

from __future__ import annotations

from typing import Any

import pytest

from weft.report.timelines import MOST_SLICES, UNIT, Timelines, from_work
from weft.simulator.facts import PathAct
from weft.traces.rows import Kind, RankTrace, Slice, StepSpan
from weft.units import Seconds

QUEUES: tuple[tuple[str, tuple[int, ...]], ...] = (("compute", ()), ("comm:0", (0, 1)))


def act(queue: str, name: str, kind: Kind, begin: int, end: int, **details: str | int) -> Slice:
    return Slice(queue, name, kind, begin, end, details)


def made(*traces: RankTrace, most: int = MOST_SLICES, path: Any = ()) -> dict[str, Any]:
    found = Timelines(most)
    found.add("measured", traces, path)
    return found.data()


def times(rank: dict[str, Any]) -> list[tuple[int, int]]:
    """Begin and end of each slice of a rank, in units."""
    found, now = [], 0
    for step, took in zip(rank["begin"], rank["took"], strict=True):
        now += step
        found.append((now, now + took))
    return found


def test_ranks_stay_on_one_clock() -> None:
    """A rank that begins late begins late in the picture, too."""
    one, two = (
        RankTrace(
            rank,
            QUEUES,
            (StepSpan(3, begin, 9000),),
            (act("compute", "forward blocks.0", "compute", begin, 8000, step=3),),
        )
        for rank, begin in ((0, 1000), (1, 3000))
    )
    found = made(one, two)
    (group,) = found["groups"]
    assert group["steps"] == [[3, 0, 80]]
    assert [times(rank) for rank in group["ranks"]] == [[(0, 70)], [(20, 70)]]


def test_slices_by_queue_with_their_words() -> None:
    trace = RankTrace(
        0,
        QUEUES,
        (StepSpan(0, 0, 10_000),),
        (
            act("compute", "forward blocks.0", "compute", 0, 4000, step=0, calls=3),
            act("compute", "forward blocks.0", "compute", 6000, 9000, step=0, calls=3),
            act("comm:0", "all_reduce x", "communication", 3000, 7000, **{"micro-batch": 1}),
        ),
    )
    found = made(trace)
    (rank,) = found["groups"][0]["ranks"]
    assert rank["queues"] == ["compute", "comm:0"]
    assert rank["queue"] == [0, 0, 1]
    assert rank["micro"] == [-1, -1, 1]
    assert times(rank) == [(0, 40), (60, 90), (30, 70)]
    kinds = [
        (kind, found["words"][name], found["words"][details])
        for kind, name, details in found["kinds"]
    ]
    assert [kinds[each] for each in rank["kind"]] == [
        ("compute", "forward blocks.0", "calls 3"),
        ("compute", "forward blocks.0", "calls 3"),
        ("communication", "all_reduce x", ""),
    ]
    # Of 4 µs of communication, from 4 to 6 µs nothing is computed.
    rows = {(kind, name): rest for kind, name, *rest in found["groups"][0]["totals"]["0"]}
    assert rows["compute", "forward blocks.*"] == [pytest.approx(7e-6), 0.0, 2]
    assert rows["communication", "all_reduce x"] == [pytest.approx(4e-6), pytest.approx(2e-6), 1]


def test_totals_are_by_step_and_the_mean_of_ranks() -> None:
    traces = [
        RankTrace(
            rank,
            QUEUES,
            (StepSpan(0, 0, 1000), StepSpan(1, 1000, 4000)),
            (
                act("compute", "a", "compute", 0, 1000, step=0),
                act("compute", "a", "compute", 1000, 1000 + 1000 * (rank + 1), step=1),
                # It says no step: it is that of the time.
                act("compute", "waits", "wait", 3500, 3600),
            ),
        )
        for rank in (0, 1)
    ]
    totals = made(*traces)["groups"][0]["totals"]
    assert totals["0"] == [["compute", "a", pytest.approx(1e-6), 0.0, 2]]
    assert totals["1"][0] == ["compute", "a", pytest.approx(1.5e-6), 0.0, 2]
    assert totals["1"][1][:2] == ["wait", "waits"]


def test_the_critical_path_is_on_the_same_clock() -> None:
    trace = RankTrace(
        0,
        QUEUES,
        (StepSpan(2, 5000, 9000),),
        (act("compute", "a", "compute", 5000, 9000, step=2),),
    )
    path = [PathAct(0, "compute", "a", 0, Seconds(5e-6), Seconds(9e-6))]
    found = made(trace, path=path)["groups"][0]["path"]
    assert found == [[0, "compute", 0, 4000 // UNIT, 0, 0]]


@pytest.mark.parametrize("waits", [False, True])
def test_many_short_acts_are_joined(waits: bool) -> None:
    """Also where waits stand between them; what is long stays itself."""
    count = 20_000
    slices = []
    for n in range(count):
        slices.append(act("compute", f"act {n % 7}", "compute", 1000 * n, 1000 * n + 900, step=0))
        if waits:
            slices.append(act("compute", "waits", "wait", 1000 * n + 900, 1000 * n + 1000))
    slices.append(act("compute", "long", "compute", 1000 * count, 3000 * count, step=0))
    trace = RankTrace(0, QUEUES, (StepSpan(0, 0, 3000 * count),), tuple(slices))
    found = made(trace, most=2000)
    (rank,) = found["groups"][0]["ranks"]
    assert 200 < len(rank["took"]) <= 2000
    spans = times(rank)
    assert spans == sorted(spans)
    assert (min(begin for begin, _ in spans), max(end for _, end in spans)) == (0, 30 * count)
    names = [found["words"][found["kinds"][each][1]] for each in rank["kind"]]
    assert names.count("long") == 1
    assert "several short acts" in names
    # Totals are those of all acts, whatever is drawn.
    rows = {name: times for _, name, _, _, times in found["groups"][0]["totals"]["0"]}
    assert rows["act 0"] == len(range(0, count, 7))


def test_what_lies_far_apart_is_not_joined() -> None:
    """An idle stretch stays one."""
    slices = tuple(
        act("compute", "a", "compute", at, at + 100, step=0)
        for at in (*range(0, 50_000, 200), *range(10_000_000, 10_050_000, 200))
    )
    trace = RankTrace(0, QUEUES, (StepSpan(0, 0, 10_050_000),), slices)
    (rank,) = made(trace, most=100)["groups"][0]["ranks"]
    assert len(rank["took"]) <= 100
    assert max(rank["took"]) * UNIT < 1_000_000


def test_a_rank_without_slices() -> None:
    (rank,) = made(RankTrace(0, QUEUES, (StepSpan(0, 0, 10),), ()))["groups"][0]["ranks"]
    assert rank["took"] == []


def test_a_step_begins_with_its_work() -> None:
    """Not with a host that runs a step ahead."""
    trace = RankTrace(
        0,
        QUEUES,
        (StepSpan(1, 100, 9000),),
        (
            act("host", "feed", "host", 100, 100, step=1),
            act("compute", "a", "compute", 5000, 9000, step=1),
        ),
    )
    (found,) = from_work([trace])
    assert found.steps == (StepSpan(1, 5000, 9000),)
    assert found.slices == trace.slices


def test_what_is_joined_says_how_full_it_is() -> None:
    slices = tuple(
        act("compute", "a", "compute", at, at + 500, step=0) for at in range(0, 400_000, 1000)
    )
    trace = RankTrace(0, QUEUES, (StepSpan(0, 0, 400_000),), slices)
    (rank,) = made(trace, most=100)["groups"][0]["ranks"]
    assert len(rank["full"]) == len(rank["took"]) <= 100
    assert all(48 <= each <= 60 for each in rank["full"])
    (whole,) = made(trace)["groups"][0]["ranks"]
    assert whole["full"] == []
