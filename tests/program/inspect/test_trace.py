"""The pieces of a trace on rows written by hand: parts of a step, late ranks, clocks, needs."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from build import register
from models import GPT, token_batch, token_loss
from on_ranks import passed
from single_device import adamw
from weft.actors.dependencies import ActKey, Dependency, dependencies, dependencies_in_step
from weft.errors import UserError
from weft.ir.plan import Compute, Feed, Hold, RankPlan
from weft.program.inspect.trace import Trace, ahead, with_late_ranks
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


# What `Program.trace` writes is what ran: every act of the plan once, in an order that the plan allows.

SCRIPT = Path(__file__).with_name("trace_on_processes.py")
STRATEGIES = {
    "data parallel": weft.data_parallel(),
    "pipeline": weft.Strategy(stages=2, micro_batches=4),
    "shards in micro-batches": weft.Strategy(
        batch={"*": weft.split(0)}, zero=weft.Zero(level=3), micro_batches=2
    ),
}

WHOLE = pytest.mark.one_process(
    "a process has the plans of its own ranks, and the first one writes"
)


@pytest.fixture(scope="module", params=STRATEGIES)
def program(request: pytest.FixtureRequest) -> Iterator[weft.Program]:
    model = GPT()
    with weft.local_world(2, timeout=30):
        yield weft.compile(
            model,
            token_loss,
            adamw(model),
            token_batch(8),
            placement=weft.placement("cpu", [0, 1]),
            strategy=STRATEGIES[request.param],
        )


def test_a_trace_says_which_plan_it_shows(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 1)
    with weft.local_world(2, timeout=30):
        ranks = weft.placement("cpu", [0, 1])
        program = weft.compile(
            model, lambda m, x: m(x).sum(), adamw(model), torch.ones(8, 4), placement=ranks
        )
        with program.recording():
            program.step(torch.ones(8, 4))
            program.step(torch.ones(8, 4))
        assert program.trace().batch == "batch float32[8, 4]"
        assert not caplog.records
        with program.recording(tmp_path / "trace.json"):
            program.step(torch.ones(8, 4))
            program.step(torch.ones(6, 4))
        assert (
            "holds 1 of the 2 steps that were recorded, those on batch float32[6, 4]" in caplog.text
        )
        assert "batch float32[6, 4]" in str(program.trace())
        content = json.loads((tmp_path / "trace.json").read_text())
        assert content["otherData"]["batch"].startswith("batch float32[6, 4]")
        program.close()


@pytest.fixture(scope="module")
def trace(program: weft.Program) -> Trace:
    """Steps 1 and 2."""
    program.step(token_batch(8))
    with program.recording():
        program.step(token_batch(8))
        program.step(token_batch(8))
    return program.trace()


def acts(rank: RankTrace) -> list[Slice]:
    return [each for each in rank.slices if each.kind != "wait"]


def within(inner: Slice, outer: Any) -> bool:
    return bool(outer.begin <= inner.begin <= inner.end <= outer.end)


@WHOLE
def test_every_act_of_the_plan_is_there_once(program: weft.Program, trace: Trace) -> None:
    for rank, plan in zip(trace, program.plan.ranks, strict=True):
        found = Counter(
            (
                each.queue,
                each.details["actor"],
                each.details["step"],
                each.details.get("micro-batch"),
            )
            for each in acts(rank)
        )
        planned = Counter(
            (actor.queue, actor.id, step, micro if actor.acts > 1 else None)
            for actor in plan.actors
            if not isinstance(actor, Hold)
            for step in (1, 2)
            for micro in range(actor.acts)
        )
        assert found == planned
        assert [step.number for step in rank.steps] == [1, 2]


def test_slices_of_a_queue_do_not_overlap(trace: Trace) -> None:
    for rank in trace:
        for queue, _ in rank.queues:
            row = [
                each
                for each in rank.slices
                if each.queue == queue and not (each.kind == "wait" and each.peers)
            ]
            assert row == sorted(row, key=lambda each: each.begin)
            for before, after in itertools.pairwise(row):
                assert before.end <= after.begin
            for each in row:
                assert any(within(each, step) for step in rank.steps)
        late = [each for each in rank.slices if each.kind == "wait" and each.peers]
        for each in late:
            assert any(within(each, act) for act in acts(rank) if act.kind == "communication")


@WHOLE
def test_producers_end_before_their_readers_begin(program: weft.Program, trace: Trace) -> None:
    for rank, plan in zip(trace, program.plan.ranks, strict=True):
        ends = {
            (each.details["actor"], each.details["step"], each.details.get("micro-batch")): each
            for each in acts(rank)
        }
        seen = 0
        for slot in plan.registers:
            producer = plan.actors[slot.producer]
            if isinstance(producer, Hold) or slot.full:
                continue
            for reader in (plan.actors[id] for id in slot.consumers):
                if producer.acts == reader.acts:
                    micros = range(producer.acts) if producer.acts > 1 else (None,)
                    for step in (1, 2):
                        for micro in micros:
                            made = ends[producer.id, step, micro]
                            assert made.end <= ends[reader.id, step, micro].begin
                            seen += 1
        assert seen
        assert all(arrow.made <= arrow.read for arrow in rank.arrows)
        assert all(arrow.source != arrow.target for arrow in rank.arrows)


def test_a_queue_waits_until_what_it_lacks_is_there(trace: Trace) -> None:
    for rank in trace:
        ends = {(each.details["actor"], each.end) for each in acts(rank)}
        waits = [each for each in rank.slices if "lacks" in each.details]
        assert waits
        for each in waits:
            assert each.end > each.begin
            begins = {act.begin for act in acts(rank) if act.queue == each.queue}
            assert (each.details["actor"], each.end) in ends or each.end in begins


def test_time_goes_to_parts_that_add_up(trace: Trace) -> None:
    for part in trace.parts:
        assert part.compute > 0
        assert part.communication > 0
        assert part.compute + part.exposed + part.idle == pytest.approx(part.step)
        assert 0 <= part.late <= part.exposed <= part.communication
    assert "exposed" in str(trace)


@WHOLE
def test_memory_is_that_of_the_plan(program: weft.Program, trace: Trace) -> None:
    for rank, found in zip(trace, program.memory(), strict=True):
        most = max(level.bytes for level in rank.levels)
        assert found.predicted.parameters < most < 2 * found.predicted.peak


@WHOLE
def test_the_file_has_a_row_for_each_queue(
    program: weft.Program, trace: Trace, tmp_path: Path
) -> None:
    path = tmp_path / "new" / "trace.json"
    program.step(token_batch(8))
    trace = program.trace(path)
    assert [step.number for rank in trace for step in rank.steps] == [3, 3]
    events = json.loads(path.read_text())["traceEvents"]
    rows = {(e["pid"], e["args"]["name"]) for e in events if e["name"] == "thread_name"}
    assert rows >= {(0, "compute"), (1, "compute"), (0, "host"), (1, "host")}
    assert any("of ranks 0, 1" in name for _, name in rows)
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == sum(len(rank.slices) for rank in trace)
    assert min(event["ts"] for event in slices) >= 0
    compute = [e for e in slices if e["cat"] == "compute"]
    assert any("models.py:" in event["args"].get("from", "") for event in compute)
    moved = {e["args"]["bytes"] for e in slices if e["cat"] == "communication"}
    assert moved
    assert all(moved)
    arrows = Counter(event["ph"] for event in events if event["ph"] in "sf")
    assert arrows["s"] == arrows["f"] == sum(len(rank.arrows) for rank in trace) > 0


@WHOLE
def test_the_predicted_step_stands_beside_the_measured_one(
    program: weft.Program, tmp_path: Path
) -> None:
    path = tmp_path / "trace.json"
    program.step(token_batch(8))
    trace = program.trace(path, predicted=True)
    events = json.loads(path.read_text())["traceEvents"]
    names = {e["args"]["name"]: e["pid"] for e in events if e["name"] == "process_name"}
    predicted = program.predicted.traces
    assert names == {
        **{f"measured rank {rank.rank}": rank.rank for rank in trace},
        **{f"predicted rank {rank.rank}": 2 + rank.rank for rank in predicted},
    }
    for traces, first in ((trace.ranks, 0), (predicted, 2)):
        own = [e for e in events if e["ph"] == "X" and e["pid"] in (first, first + 1)]
        assert len(own) == sum(len(rank.slices) for rank in traces)
        assert min(event["ts"] for event in own) < 1e6  # both begin at 0, not when the clock did
    arrows = Counter((event["ph"], event["id"]) for event in events if event["ph"] in "sf")
    assert set(arrows.values()) == {1}


def test_without_a_step_there_is_nothing_to_trace() -> None:
    program = weft.compile(
        torch.nn.Linear(2, 2),
        lambda model, batch: model(batch).sum(),
        None,
        torch.ones(2, 2),
        placement=weft.placement("cpu", [0]),
    )
    with pytest.raises(UserError, match="call step first"):
        program.trace()
    with program.recording():
        program.step(torch.ones(2, 2))
    assert len(program.trace().ranks[0].steps) == 1


def test_a_block_that_fails_writes_nothing(program: weft.Program, tmp_path: Path) -> None:
    path = tmp_path / "new" / "trace.json"

    def failing() -> None:
        with program.recording(path):
            program.step(token_batch(8))
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        failing()
    assert not path.exists()
    program.step(token_batch(8))
    program.step(token_batch(8))
    assert len(program.trace().ranks[0].steps) == 1


@WHOLE
def test_segments_are_named_after_their_modules(program: weft.Program, trace: Trace) -> None:
    for rank, plan in zip(trace, program.plan.ranks, strict=True):
        names = {each.details["actor"]: each.name for each in acts(rank)}
        for actor in plan.actors:
            if isinstance(actor, Compute):
                assert names[actor.id].split()[0] in ("forward", "backward", "weight", "update")
        ends = {"tokens", "head"}
        assert any(not ends.isdisjoint(name.split()) for name in names.values())


@pytest.mark.slow
def test_processes_write_one_file(tmp_path: Path) -> None:
    passed(SCRIPT, 2, str(tmp_path))
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in slices} == {0, 1}
    meetings: dict[Any, dict[int, Any]] = {}
    seen: Counter[tuple[int, int]] = Counter()
    for event in slices:
        if event["cat"] == "communication":
            row = event["pid"], event["tid"]
            meetings.setdefault((row[1], seen[row]), {})[row[0]] = event
            seen[row] += 1
    assert meetings
    # On one clock, nobody ends a collective before all have begun it.
    for both in meetings.values():
        assert both[0]["ts"] <= both[1]["ts"] + both[1]["dur"]
        assert both[1]["ts"] <= both[0]["ts"] + both[0]["dur"]
    alone = (tmp_path / "alone.txt").read_text()
    assert "rank 0" in alone
    assert "did not answer in time" in alone


def test_a_timeline_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    trace = Trace((RankTrace(0, (), (), ()),))
    trace.write(tmp_path / "new" / "step.json")
    assert json.loads((tmp_path / "new" / "step.json").read_text())["traceEvents"]
    with pytest.raises(UserError, match=r"cannot write the timeline .*: Is a directory; give"):
        trace.write(tmp_path)
