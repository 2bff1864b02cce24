"""The acts that bring batches to their steps stand in traces, with the number of the step for which they were."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from program.data.datasets import Drawn, example, loss_fn, net
from single_device import is_first, processes
from weft.traces.rows import RankTrace

SIZE = 10


@pytest.fixture
def program() -> Iterator[weft.Program]:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with weft.local_world(2):
        made = weft.compile(
            *(model, loss_fn, optimizer, example(SIZE)), placement=weft.placement("cpu", [0, 1])
        )
        yield made
        made.close()


class Batches:
    """An iterable of a few batches."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(list(weft.Loader(Drawn(), SIZE)))


def acts(trace: RankTrace, queue: str) -> list[tuple[str, int]]:
    return [
        (each.name, int(each.details["step"]))
        for each in trace.slices
        if each.queue == queue and each.kind == "host"
    ]


def test_rows_beside_the_queues(program: weft.Program, tmp_path: Path) -> None:
    """Of the first rank of a process; of two loops, and a step by hand, of which nothing was loaded."""
    with program.recording(tmp_path / "steps.json"):
        for _ in program.run(Batches()):
            pass
        program.step(example(SIZE))
        for _ in program.run(Batches(), ahead=1):
            pass
    trace = program.trace()
    first, second = trace.ranks
    assert [queue for queue, _ in first.queues][-2:] == ["load", "copies"]
    loads = {"load", "copies"} <= {queue for queue, _ in second.queues}
    assert loads == (processes() == 2)
    loaded = [*range(5), *range(6, 11)]
    assert acts(first, "load") == [("load", number) for number in loaded]
    assert acts(first, "copies") == [("copy", number) for number in range(5)]
    begins = {step.number: step.begin for step in first.steps}
    assert list(begins) == list(range(11))
    for each in first.slices:
        if each.queue in ("load", "copies"):
            assert each.end <= begins[int(each.details["step"])]
    for queue in ("load", "copies"):
        row = [each for each in first.slices if each.queue == queue]
        assert all(one.end <= other.begin for one, other in itertools.pairwise(row))
    # A version of each leaf goes from queue to queue.
    passed = [
        (each.source, each.target) for each in first.arrows if each.source in ("load", "copies")
    ]
    assert passed.count(("load", "copies")) == 5 * 2
    # To each rank of the process.
    own = len(trace.ranks) // processes()
    assert passed.count(("copies", "compute")) == 5 * 2 * own
    assert passed.count(("load", "compute")) == 5 * 2
    if is_first():
        events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
        named = {each["args"]["name"] for each in events if each["name"] == "thread_name"}
        assert {"load", "copies"} <= named


def test_the_last_step_has_its_own(program: weft.Program) -> None:
    """Without a recording; nothing of a step that was made by hand."""
    for _ in program.run(Batches()):
        pass
    assert acts(program.trace().ranks[0], "load") == [("load", 4)]
    program.step(example(SIZE))
    assert acts(program.trace().ranks[0], "load") == []
    assert "load" not in {queue for queue, _ in program.trace().ranks[0].queues}


def test_back_pressure_shows(program: weft.Program) -> None:
    """Where steps are slow, loading waits for the copy that one gives back."""
    with program.recording():
        for _ in program.run(Batches()):
            torch.randn(400, 400).matmul(torch.randn(400, 400))
    waits = [
        each.name
        for each in program.trace().ranks[0].slices
        if each.queue in ("load", "copies") and each.kind == "wait"
    ]
    assert any(
        each.startswith("waits for a free copy of") and "read by" in each for each in waits
    ), waits


def test_steps_are_counted_as_the_program_counts(program: weft.Program, tmp_path: Path) -> None:
    """Behind a checkpoint, and by a plan for another shape."""
    for _ in range(3):
        program.step(example(SIZE))
    program.save(tmp_path / "saved")
    program.step(example(SIZE))
    program.load(tmp_path / "saved")
    for _ in range(2):
        program.step(example(2 * SIZE))
    for _ in program.run(Batches()):
        pass
    (first, *_) = program.trace().ranks
    assert [each.number for each in first.steps] == [program.steps - 1] == [9]
    assert [each.number for each in first.data] == [9]
    assert acts(first, "load") == [("load", 9)]
    assert {each.details["step"] for each in first.slices if "step" in each.details} == {9}
