"""Memory over a step by kind: its top is the plan's peak, and what is alive then is named."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import weft
from report.reported import planned
from weft.compiler.memory.order import moments_of
from weft.compiler.memory.walk import levels, memory
from weft.report.timelines import memory_rows
from weft.simulator.clock import Timed
from weft.strategy.strategy import Strategy
from weft.traces.rows import Level, RankTrace, StepSpan
from weft.units import Bytes, Seconds

DATA = {"*": weft.split(0)}
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "zero": ({"batch": DATA, "zero": weft.Zero(3)}, (4,)),
    "stages": ({"batch": DATA, "stages": 2, "micro_batches": 4}, (2, 2)),
}


@pytest.mark.parametrize("case", CASES)
def test_its_top_is_the_peak(case: str) -> None:
    entries, grid = CASES[case]
    compiled, simulation = planned(Strategy(**entries), grid)
    rows = memory_rows(compiled, {"predicted": simulation.traces})
    assert {row["rank"] for row in rows} == {each.rank for each in simulation.traces}
    for row in rows:
        sums = [sum(each) for each in zip(*row["levels"], strict=True)]
        assert max(sums) == row["peak"]["bytes"]
        assert row["times"] == sorted(row["times"])
        assert {"parameters", "states", "activations"} <= set(row["kinds"])
        assert row["peak"]["held"]
        assert any("models.py" in where for *_, where in row["peak"]["held"])
    assert simulation.memory is not None
    assert simulation.memory.planned == max(row["peak"]["bytes"] for row in rows)


def test_a_rank_of_another_process_is_walked_by_a_plan_with_the_same_bytes() -> None:
    compiled, simulation = planned(Strategy(batch=DATA), (4,))
    (trace,) = simulation.traces
    # The plans of the ranks of one process, of which none is said to stand for others.
    own = replace(compiled, schedule=replace(compiled.schedule, classes={}))
    (expected,) = memory_rows(own, {"measured": [trace]})
    span = trace.steps[-1]
    acts = [
        Timed(
            *(int(each.details["actor"]), int(each.details.get("micro-batch", 0))),
            *(Seconds((x - span.begin) / 1e9) for x in (each.begin, each.end)),
        )
        for each in trace.slices
        if each.kind != "wait" and each.details.get("step") == span.number
    ]
    (plan,) = own.schedule.plans
    sizes = levels(plan, moments_of(acts))
    told = tuple(Level(span.begin, size) for size in sizes)
    (found,) = memory_rows(own, {"measured": [replace(trace, rank=3, levels=told)]})
    assert found == {**expected, "rank": 3}
    other = (*told[:-1], Level(span.begin, Bytes(told[-1].bytes + 1)))
    (found,) = memory_rows(own, {"measured": [replace(trace, rank=3, levels=other)]})
    assert found["kinds"] == ["all kinds"]


def test_few_points_keep_the_top(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled, simulation = planned(Strategy(batch=DATA), (4,))
    monkeypatch.setattr("weft.report.timelines._POINTS", 40)
    (row,) = memory_rows(compiled, {"predicted": simulation.traces})
    assert len(row["times"]) <= 41
    assert max(map(sum, zip(*row["levels"], strict=True))) == row["peak"]["bytes"]


def test_without_plans_a_trace_says_all_kinds_together() -> None:
    levels = tuple(Level(1000 * n, Bytes(n * 10 if n < 5 else 5)) for n in range(8))
    trace = RankTrace(3, (), (StepSpan(0, 0, 4000), StepSpan(1, 4001, 8000)), (), (), levels)
    first, second = memory_rows(None, {"measured": [trace]})
    assert (first["rank"], first["step"], first["kinds"]) == (3, 0, ["all kinds"])
    assert first["levels"] == [[0, 10, 20, 30, 40]]
    assert first["peak"] == {"at": 40, "bytes": 40, "held": []}
    assert (second["step"], second["from"], second["peak"]["bytes"]) == (1, 40, 5)
    assert memory_rows(None, {"measured": [replace(trace, levels=())]}) == []


def test_acts_of_another_plan_are_not_walked() -> None:
    """A trace with acts missing has no levels by kind: they would be wrong."""
    compiled, simulation = planned(Strategy(batch=DATA), (4,))
    (trace,) = simulation.traces
    cut = replace(trace, slices=trace.slices[:-1])
    assert memory_rows(compiled, {"predicted": [cut]}) == []


def test_a_walk_is_that_of_the_compiler() -> None:
    compiled, simulation = planned(Strategy(batch=DATA), (4,))
    (trace,) = simulation.traces
    (row,) = memory_rows(compiled, {"predicted": [trace]})
    acts = [
        Timed(
            int(s.details["actor"]),
            int(s.details.get("micro-batch", 0)),
            Seconds(s.begin / 1e9),
            Seconds(s.end / 1e9),
        )
        for s in trace.slices
    ]
    found = memory(compiled.plan.ranks[0], moments_of(acts))
    assert found.memory.peak == row["peak"]["bytes"]
    assert [each.register for each in found.held[:5]] == [
        name for name, *_ in row["peak"]["held"][:5]
    ]
