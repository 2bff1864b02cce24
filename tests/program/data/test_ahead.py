"""Batches are loaded ahead of their steps: the same ones, and the loader's place is that of the steps."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from program.data.datasets import Drawn, example, loss_fn, net, plain_losses
from weft.errors import UserError
from weft.program.data.ahead import loaded_ahead

SIZE = 10


def thread_is_gone() -> bool:
    return not any(each.name == "weft loads ahead" for each in threading.enumerate())


@pytest.mark.parametrize("number", [0, 1, 3, 100])
def test_items_are_the_same(number: int) -> None:
    assert list(loaded_ahead(iter(range(20)), number)) == list(range(20))
    assert thread_is_gone()


def test_as_many_as_it_may_be_ahead() -> None:
    """The thread has one in its hand."""
    asked: list[int] = []
    third = threading.Event()

    def items() -> Iterator[int]:
        for number in range(20):
            asked.append(number)
            if number == 3:
                third.set()
            yield number

    stream = loaded_ahead(items(), 2)
    assert next(stream) == 0
    assert third.wait(10)
    assert max(asked) == 3
    assert next(stream) == 1
    stream.close()  # type: ignore[attr-defined]
    assert thread_is_gone()


def test_an_error_comes_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise OSError("the file is gone")

    stream = loaded_ahead(items(), 5)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the file is gone"):
        next(stream)
    assert thread_is_gone()


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


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("workers", [0, 2])
def test_a_run_is_a_loop(program: weft.Program, ahead: int, workers: int) -> None:
    """Also what samples draw; the place of the loader is behind the last step."""
    loader = weft.Loader(Drawn(), SIZE, program, shuffle=True, workers=workers)
    losses, places = [], []
    for loss in program.run(loader, ahead=ahead):
        losses.append(loss.item())
        places.append(loader.state_dict()["step"])
    expected = plain_losses(weft.Loader(Drawn(), SIZE, shuffle=True), 1)
    assert losses == pytest.approx(expected, rel=1e-12)
    assert places == [1, 2, 3, 4, 5]
    assert (loader.epoch, program.steps) == (1, 5)
    assert thread_is_gone()


def test_any_batches_do(program: weft.Program) -> None:
    batches = list(weft.Loader(Drawn(), SIZE, shuffle=True))
    found = [loss.item() for loss in program.run(batches)]
    assert found == pytest.approx(plain_losses(batches, 1), rel=1e-12)
    for _ in program.run(batches):
        break
    assert program.steps == 6
    assert thread_is_gone()


def test_a_batch_whose_step_failed_comes_again(program: weft.Program) -> None:
    loader = weft.Loader(Drawn(), SIZE, program)
    run = program.run(loader)
    next(run)
    with pytest.raises(UserError, match="autocast"), torch.autocast("cpu", torch.bfloat16):
        next(run)
    assert (loader.state_dict()["step"], program.steps) == (1, 1)
    assert sum(1 for _ in program.run(loader)) == 4


def test_waits_are_told(program: weft.Program) -> None:
    assert "waited" not in program.explain()

    def slow() -> Iterator[Any]:
        for batch in weft.Loader(Drawn(), SIZE, shuffle=True):
            threading.Event().wait(0.05)
            yield batch

    for _ in program.run(slow(), ahead=0):
        pass
    (line,) = [each for each in program.explain().splitlines() if each.startswith("step: ")]
    found = re.search(r"which waited ([\d.]+) ms for its batch", line)
    assert found
    assert float(found[1]) >= 50
    trace = program.trace()
    assert [float(found[1])] * 2 == pytest.approx(
        [1e3 * each.data for each in trace.parts], rel=0.01
    )
    assert trace.ranks[0].data[0].end <= trace.ranks[0].steps[0].begin
    program.step(example(SIZE))  # nobody waited for it
    assert "waited" not in program.explain()
    assert [each.data for each in program.trace().parts] == [0.0, 0.0]


def test_waits_of_all_recorded_steps_are_told(program: weft.Program, tmp_path: Path) -> None:
    """Of a loop of weft's own, too."""
    loader = weft.Loader(Drawn(), SIZE, program, shuffle=True, drop_last=True)
    with program.recording(tmp_path / "steps.json"):
        weft.fit(program, loader, epochs=1, progress=False)
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    named = [each["name"] for each in events if each["name"].startswith("waits for the batch")]
    assert sorted(named) == sorted(2 * [f"waits for the batch of step {n}" for n in range(5)])


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(([], -1), "ahead takes"), (([], True), "ahead takes"), ((3,), "takes batches")],
)
def test_wrong_arguments(program: weft.Program, arguments: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        program.run(*arguments)
