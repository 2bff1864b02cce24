"""Steps of timelines: on one clock, with totals by cause."""

from __future__ import annotations

import pytest

from weft.report.timelines import from_work, step_rows
from weft.traces.rows import Kind, RankTrace, Slice, StepSpan

QUEUES: tuple[tuple[str, tuple[int, ...]], ...] = (("compute", ()), ("comm:0", (0, 1)))


def act(queue: str, name: str, kind: Kind, begin: int, end: int, **details: str | int) -> Slice:
    return Slice(queue, name, kind, begin, end, details)


def test_a_step_reaches_from_the_first_rank_to_the_last() -> None:
    traces = [
        RankTrace(rank, QUEUES, (StepSpan(3, begin, end),), ())
        for rank, begin, end in ((0, 1000, 8000), (1, 3000, 9000))
    ]
    rows = step_rows("measured", traces)
    assert (rows["group"], rows["ranks"], rows["steps"]) == ("measured", 2, [[3, 0, 80]])


def test_causes_are_those_of_repeated_blocks_together() -> None:
    trace = RankTrace(
        0,
        QUEUES,
        (StepSpan(0, 0, 10_000),),
        (
            act("compute", "forward blocks.0", "compute", 0, 4000, step=0, calls=3),
            act("compute", "forward blocks.1", "compute", 6000, 9000, step=0, calls=3),
            act("comm:0", "all_reduce x", "communication", 3000, 7000, **{"micro-batch": 1}),
        ),
    )
    # Of 4 µs of communication, from 4 to 6 µs nothing is computed.
    rows = {
        (kind, name): rest for kind, name, *rest in step_rows("measured", [trace])["totals"]["0"]
    }
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
    totals = step_rows("measured", traces)["totals"]
    assert totals["0"] == [["compute", "a", pytest.approx(1e-6), 0.0, 2]]
    assert totals["1"][0] == ["compute", "a", pytest.approx(1.5e-6), 0.0, 2]
    assert totals["1"][1][:2] == ["wait", "waits"]


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
