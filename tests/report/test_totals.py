"""The shares of a step: computing, exposed communication and idle time add up to it, whatever runs side by side."""

from __future__ import annotations

import pytest

from weft.report.timelines import shares, totals
from weft.traces.rows import Kind, RankTrace, Slice, StepSpan

QUEUES: tuple[tuple[str, tuple[int, ...]], ...] = (
    *(("compute", ()), ("comm:0", (0, 1))),
    ("comm:1", (0, 1)),
)


def act(queue: str, kind: Kind, begin: int, end: int, step: int = 0) -> Slice:
    return Slice(queue, f"{kind} of {queue}", kind, begin, end, {"step": step})


def test_two_exchanges_at_once_count_once() -> None:
    trace = RankTrace(
        0,
        QUEUES,
        (StepSpan(0, 0, 10_000),),
        (
            act("compute", "compute", 0, 4_000),
            act("compute", "wait", 4_000, 9_000),
            act("comm:0", "communication", 3_000, 8_000),
            act("comm:0", "wait", 3_000, 5_000),
            act("comm:1", "communication", 6_000, 9_000),
        ),
    )
    (found,) = shares([trace]).values()
    expected = {"step": 10.0, "compute": 4.0, "exposed": 5.0, "hidden": 1.0, "idle": 1.0}
    assert found == {name: pytest.approx(micro * 1e-6) for name, micro in expected.items()}
    # By cause each exchange counts for itself.
    exposed = sum(bare for kind, _, _, bare, _ in totals([trace])["0"] if kind == "communication")
    assert exposed == pytest.approx(7e-6)


def test_they_are_the_mean_of_ranks_step_by_step() -> None:
    traces = [
        RankTrace(
            rank,
            QUEUES,
            (StepSpan(0, 0, 1_000), StepSpan(1, 1_000, 3_000)),
            (
                act("compute", "compute", 0, 500),
                act("compute", "compute", 1_000, 1_500 + 500 * rank, 1),
            ),
        )
        for rank in (0, 1)
    ]
    found = shares(traces)
    assert found["0"]["compute"] == pytest.approx(0.5e-6)
    assert found["1"]["compute"] == pytest.approx(0.75e-6)
    assert found["1"]["idle"] == pytest.approx(1.25e-6)


def test_of_many_steps_the_longest_and_the_last_are_kept() -> None:
    spans = tuple(StepSpan(n, 100 * n, 100 * n + (90 if n == 3 else 50)) for n in range(200))
    trace = RankTrace(
        0, QUEUES, spans, tuple(act("compute", "compute", b, e, n) for n, b, e in spans)
    )
    assert shares([trace]).keys() == totals([trace]).keys()
    assert {"3", "199"} <= shares([trace]).keys()
    assert len(shares([trace])) == 64
