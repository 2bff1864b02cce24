"""Batches are loaded ahead of their steps: the same ones, and the loader's place is that of the steps."""

from __future__ import annotations

import gc
import json
import re
import signal
import sys
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue
from time import monotonic
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import weft
from program.data.datasets import (
    CLASSES,
    SAMPLES,
    WIDTH,
    Drawn,
    example,
    loss_fn,
    net,
    plain_losses,
)
from single_device import is_first, processes
from weft.errors import UserError
from weft.program.data.feed import LoadedLeaf
from weft.program.data.loading import LoadingActs, loading_plan, prefetched

SIZE = 10


NAMES = ("weft load", "weft copies")


def threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name in NAMES]


def threads_are_gone() -> bool:
    return not threads()


def loaded(items: Iterator[Any], ahead: int, **calls: Any) -> Iterator[Any]:
    """Items on the way by a plan for batches of one leaf."""
    leaf = LoadedLeaf("x", "x", (4,), "float32", {0: ((0, 4),)})
    cut, note = calls.get("cut", lambda item: item), calls.get("note", lambda acts: None)
    return prefetched(items, loading_plan(0, [leaf], ahead), cut, note)


@pytest.mark.parametrize("ahead", [1, 2, 100])
def test_items_are_the_same(ahead: int) -> None:
    assert list(loaded(iter(range(20)), ahead)) == list(range(20))
    assert threads_are_gone()


@pytest.mark.parametrize("ahead", [1, 2, 4])
def test_credits_bound_how_far_ahead(ahead: int) -> None:
    """Each item that is taken makes room for one; loading waits for it, and asks for no more."""
    asked: SimpleQueue[int] = SimpleQueue()

    def items() -> Iterator[int]:
        for number in range(20):
            asked.put(number)
            yield number

    stream = loaded(items(), ahead)
    for taken in range(5):
        assert next(stream) == taken
        # Those that may be ahead come, whenever they do.
        for number in range(ahead + 1 if not taken else 1):
            assert asked.get(timeout=10) == (taken + ahead if taken else number)
        wait_until_idle("weft load")
        assert asked.empty()
    stream.close()  # type: ignore[attr-defined]
    assert threads_are_gone()


def wait_until_idle(name: str) -> None:
    """Until a thread waits for its bell, which it does in `serve`; one of its name may wait for it."""
    until = monotonic() + 10
    while monotonic() < until:
        frames = sys._current_frames()
        found = (frames.get(t.ident or 0) for t in threading.enumerate() if t.name == name)
        if any(frame is not None and frame.f_code.co_name == "serve" for frame in found):
            return
    raise AssertionError("it has not come to rest")


def test_an_error_comes_in_its_place() -> None:
    def items() -> Iterator[int]:
        yield from range(3)
        raise OSError("the file is gone")

    stream = loaded(items(), 5)
    assert [next(stream) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the file is gone"):
        next(stream)
    assert threads_are_gone()


def test_a_copy_runs_on_its_thread_once_for_each_item() -> None:
    seen: list[tuple[int, str]] = []

    def cut(item: int) -> int:
        seen.append((item, threading.current_thread().name))
        return item * 10

    assert list(loaded(iter(range(4)), 2, cut=cut)) == [0, 10, 20, 30]
    assert seen == [(number, "weft copies") for number in range(4)]
    assert list(loaded(iter(range(4)), 1, cut=cut)) == list(range(4))  # nothing is cut ahead


def test_what_goes_wrong_in_a_thread_is_raised() -> None:
    """Which a copy must not; nobody waits for it for ever."""

    def cut(item: int) -> int:
        return 1 // item

    stream = loaded(iter((1, 0)), 2, cut=cut)
    assert next(stream) == 1
    with pytest.raises(ZeroDivisionError):
        next(stream)
    assert threads_are_gone()


def test_acts_are_told_before_their_item() -> None:
    told: list[LoadingActs] = []
    for number, _ in enumerate(loaded(iter(range(6)), 3, note=told.append)):
        acts = told[number]
        assert (len(told), acts.number) == (number + 1, number)
        queues = [acts.plan.actors[act.actor].queue for act, _, _ in acts.spans]
        assert sorted(queues) == ["compute", "copies", "load"]
        assert {act.step for act, _, _ in acts.spans} == {number}
        times = dict(zip(queues, acts.spans, strict=True))
        assert times["load"][2] <= times["copies"][1] <= times["copies"][2] <= times["compute"][1]


def test_an_interrupt_ends_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while it waits for data."""
    monkeypatch.setattr("weft.program.data.loading.PATIENCE", 0.0)
    main, interrupted = threading.main_thread().ident or 0, threading.Event()

    def items() -> Iterator[int]:
        yield 0
        signal.pthread_kill(main, signal.SIGINT)
        assert interrupted.wait(10)
        yield 1

    stream = loaded(items(), 2)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    left = threads()
    interrupted.set()
    for thread in left:
        thread.join(10)
    assert threads_are_gone()


class Batch:
    """Something of which one can see whether it is held."""


def test_a_loop_that_is_left_holds_nothing() -> None:
    """Neither what was loaded for it, nor what it loads from; with the garbage collector off."""
    made: list[weakref.ref[Batch]] = []

    def items() -> Iterator[Batch]:
        while True:
            batch = Batch()
            made.append(weakref.ref(batch))
            yield batch
            del batch

    gc.collect()
    gc.disable()
    try:
        source = items()
        stream = loaded(source, 4)
        held = weakref.ref(source)
        del source
        for _ in range(3):
            next(stream)
        stream.close()  # type: ignore[attr-defined]
        del stream
        assert threads_are_gone()
        assert len(made) >= 3
        assert not any(each() for each in made)
        assert held() is None
    finally:
        gc.enable()


def test_a_loop_is_left_while_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is not waited for for ever; and what it brings is dropped, when it comes."""
    monkeypatch.setattr("weft.program.data.loading.PATIENCE", 0.0)
    begun, wanted = threading.Event(), threading.Event()
    made: list[weakref.ref[Batch]] = []

    def items() -> Iterator[Any]:
        yield 0
        begun.set()
        assert wanted.wait(10)
        batch = Batch()
        made.append(weakref.ref(batch))
        yield batch
        del batch

    stream = loaded(items(), 2)
    assert next(stream) == 0
    assert begun.wait(10)
    left = threads()
    assert left
    stream.close()  # type: ignore[attr-defined]
    wanted.set()
    for thread in left:
        thread.join(10)
    assert threads_are_gone()
    assert [each() for each in made] == [None]


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
    assert threads_are_gone()


def test_any_batches_do(program: weft.Program) -> None:
    batches = list(weft.Loader(Drawn(), SIZE, shuffle=True))
    found = [loss.item() for loss in program.run(batches)]
    assert found == pytest.approx(plain_losses(batches, 1), rel=1e-12)
    for _ in program.run(batches):
        break
    assert program.steps == 6
    assert threads_are_gone()


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
    waited = [1e3 * each.data for each in trace.parts]
    assert float(found[1]) == pytest.approx(waited[not is_first()], rel=0.01)
    assert trace.ranks[0].data[0].end <= trace.ranks[0].steps[0].begin
    program.step(example(SIZE))  # nobody waited for it
    assert "waited" not in program.explain()
    assert [each.data for each in program.trace().parts] == [0.0, 0.0]


def test_waits_of_all_recorded_steps_are_told(program: weft.Program, tmp_path: Path) -> None:
    """Of a loop of weft's own, too."""
    loader = weft.Loader(Drawn(), SIZE, program, shuffle=True, drop_last=True)
    with program.recording(tmp_path / "steps.json"):
        weft.fit(program, loader, epochs=1, progress=False)
    if not is_first():
        return
    events = json.loads((tmp_path / "steps.json").read_text())["traceEvents"]
    named = [each["name"] for each in events if each["name"].startswith("waits for the batch")]
    assert sorted(named) == sorted(2 * [f"waits for the batch of step {n}" for n in range(5)])


class Reused:
    """An iterable that writes every batch into the same tensors, as it is asked for it."""

    def __init__(self, batches: list[dict[str, torch.Tensor]]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        own = {key: torch.zeros_like(leaf) for key, leaf in self.batches[0].items()}
        for batch in self.batches:
            for key, leaf in batch.items():
                own[key].copy_(leaf)
            yield own


@pytest.mark.parametrize("ahead", [0, 1, 2, 4])
def test_memory_that_is_used_again(program: weft.Program, ahead: int) -> None:
    """A batch is read as it was when it was loaded."""
    batches = list(weft.Loader(Drawn(), SIZE, shuffle=True))
    found = [loss.item() for loss in program.run(Reused(batches), ahead=ahead)]
    assert found == pytest.approx(plain_losses(batches, 1), rel=1e-12)


def test_memory_of_ranks_that_is_used_again(program: weft.Program) -> None:
    """Of global tensors, which are there already: they are copied, and cut by their step."""
    batches = list(weft.Loader(Drawn(), SIZE, shuffle=True))

    def items() -> Iterator[Any]:
        own = {
            key: weft.tensor(leaf, placement=program.placement, sbp=weft.split(0))
            for key, leaf in batches[0].items()
        }
        for batch in batches:
            for key, leaf in own.items():
                for rank, shard in leaf.shards().items():
                    shard.copy_(batch[key].chunk(2)[rank])
            yield own

    found = [loss.item() for loss in program.run(items(), ahead=3)]
    assert found == pytest.approx(plain_losses(batches, 1), rel=1e-12)


def test_a_list_is_read_by_its_steps(program: weft.Program) -> None:
    """The loop may change what comes next."""
    batches = list(weft.Loader(Drawn(), SIZE, shuffle=True))
    expected = plain_losses([batches[0], *({**b, "x": 2 * b["x"]} for b in batches[1:])], 1)
    found = []
    for number, loss in enumerate(program.run(batches), 1):
        found.append(loss.item())
        for batch in batches[number : number + 1]:
            batch["x"] *= 2
    assert found == pytest.approx(expected, rel=1e-12)


OWN_ROWS = pytest.mark.one_process("the workers of a process load its own rows")


@pytest.mark.parametrize("source", [pytest.param("weft", marks=OWN_ROWS), "torch"])
def test_batches_of_workers_are_cut_on_the_way(
    program: weft.Program, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the thread of the copies alone, and not copied besides; the last batch, of another shape, by its step."""
    cut: list[tuple[str, int]] = []
    feeder = type(program._core.variants.current.feeder)
    inner = feeder.cut

    def seen(self: Any, batch: Any) -> Any:
        found = inner(self, batch)
        cut.append((threading.current_thread().name, next(iter(found.plain.values())).shape[0]))
        return found

    monkeypatch.setattr(feeder, "cut", seen)
    monkeypatch.setattr("weft.program.stepping._copied", None)
    size = 20
    expected = plain_losses(weft.Loader(Numbered(), size), 1)
    batches: Any = (
        weft.Loader(Numbered(), size, program, workers=1)
        if source == "weft"
        else DataLoader(Numbered(), size, num_workers=1)
    )
    cut.clear()
    program.step(example(size))  # planned for this shape now
    program.load_full_state_dict(net().state_dict())
    cut.clear()
    found = [loss.item() for loss in program.run(batches)]
    assert found == pytest.approx(expected, rel=1e-12)
    assert cut == [("weft copies", 20)] * 2 + [("weft copies", SIZE)]


class Numbered(Drawn):
    """Draws nothing, so that any loader gives the same."""

    def __getitem__(self, number: int) -> dict[str, Any]:
        return {"x": torch.full((WIDTH,), number / SAMPLES).double(), "y": number % CLASSES}


@pytest.mark.one_process("it reads the plan of both ranks")
def test_a_plan_says_how_batches_come(program: weft.Program) -> None:
    assert "loading ahead" not in program.explain(details=True)
    for _ in program.run(weft.Loader(Drawn(), SIZE, program, workers=1), ahead=3):
        pass
    text = program.explain(details=True)
    # Of 10 rows of 6 doubles and a number: 560 B.
    assert "loading ahead of the steps, by the last loop: 3 batches, 1.6 KiB in registers" in text
    assert "register %x : float64[10, 6] batch credits 2 from 0 to [1]" in text
    assert "register %rank1.x : float64[5, 6] batch credits 1 from 1 to [2]" in text
    assert 'actor 1 on "copies" compute' in text


class Counted(Numbered):
    """Counts in memory that a worker shares."""

    def __init__(self) -> None:
        super().__init__()
        self.count = torch.zeros((), dtype=torch.long).share_memory_()

    def __getitem__(self, number: int) -> dict[str, Any]:
        self.count += 1
        return super().__getitem__(number)


def test_slow_steps_hold_workers_back(program: weft.Program) -> None:
    """One batch is the step's, one is ahead, one is the worker's: nobody asks for more."""
    data = Counted()
    loader = weft.Loader(data, SIZE, program, workers=1, ahead=1)
    run = program.run(loader, ahead=1)
    # Processes compare three samples, each loaded twice.
    compared = 6 if processes() > 1 else 0
    for steps in range(1, 3):
        next(run)
        expected, until = (steps + 2) * SIZE // processes() + compared, monotonic() + 10
        while data.count < expected and monotonic() < until:
            threading.Event().wait(0.001)
        wait_until_idle("weft load")
        assert data.count == expected
    run.close()  # type: ignore[attr-defined]
    assert threads_are_gone()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(([], -1), "ahead must be"), (([], True), "ahead must be"), ((3,), "must be batches")],
)
def test_wrong_arguments(program: weft.Program, arguments: Any, text: str) -> None:
    with pytest.raises(UserError, match=text):
        program.run(*arguments)
