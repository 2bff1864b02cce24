"""Programs on streams: a step is a list of acts on one thread, and events keep what the plan says."""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import weft
from inline_streams import Inline
from models import GPT, token_batch, token_loss
from single_device import adamw
from weft.actors.dependencies import dependencies_in_step
from weft.errors import InternalError, RankFailure
from weft.runtime.devices import backend as cuda_streams
from weft.runtime.devices.backend import BACKENDS, CudaStreams, Launch, MakeStreams
from weft.runtime.executor.device_executor import DeviceExecutor, launches

pytestmark = pytest.mark.usefixtures("double_precision")

STRATEGIES = {
    "data": weft.data_parallel(),
    "tensor": weft.tensor_parallel(["blocks.*.qkv", "blocks.*.up"], ["blocks.*.proj"]),
    "pipeline": weft.Strategy(stages=2, micro_batches=4, schedule="zero_bubble"),
    "shards in micro-batches": weft.Strategy(
        batch={"*": weft.split(0)}, zero=weft.Zero(level=3), micro_batches=2
    ),
}


class FakeEvent:
    """Knows what its stream knew when it was recorded; `done` says of the event whether that is done."""

    done: Any = staticmethod(lambda event: True)

    def __init__(self, enable_timing: bool = False) -> None:
        self.known: frozenset[int] = frozenset()
        self.number = -1

    def record(self, stream: FakeStream) -> None:
        FakeStream.count += 1
        self.number = FakeStream.count
        stream.known |= {self.number}
        self.known = stream.known

    def query(self) -> bool:
        return bool(FakeEvent.done(self))

    def synchronize(self) -> None:
        assert self.query()

    def elapsed_time(self, other: FakeEvent) -> float:
        return float(other.number - self.number)


class FakeStream:
    """Knows the numbers of all events that come before what is put on it next."""

    count = 0

    def __init__(self, device: Any = None) -> None:
        self.known: frozenset[int] = frozenset()

    def wait_event(self, event: FakeEvent) -> None:
        self.known |= event.known


class Watched(CudaStreams):
    """CudaStreams that notes what is known before each act, and which tensors are kept for a stream."""

    every: ClassVar[list[Watched]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.before: list[dict[int, frozenset[int]]] = []
        self.ends: list[dict[int, int]] = []
        self.kept = 0
        Watched.every.append(self)

    def begin(self) -> None:
        super().begin()
        self.before.append({})
        self.ends.append({})

    def enter(self, launch: Launch) -> None:
        super().enter(launch)
        stream = self._streams.get(launch.queue, self._caller)
        self.before[-1][launch.place] = stream.known

    def leave(self, launch: Launch) -> None:
        super().leave(launch)
        self.ends[-1][launch.place] = self._now.ended[launch.place].number

    def read(self, tensor: Tensor) -> None:
        self.kept += 1


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    callers: dict[Any, FakeStream] = {}
    monkeypatch.setattr(cuda_streams, "_event", FakeEvent)
    monkeypatch.setattr(cuda_streams, "_stream", FakeStream)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda device: callers.setdefault(device, FakeStream())
    )
    on_cpu(monkeypatch, Watched)
    Watched.every = []
    FakeStream.count = 0
    yield
    FakeEvent.done = staticmethod(lambda event: True)


def on_cpu(monkeypatch: pytest.MonkeyPatch, streams: MakeStreams) -> None:
    """Ranks on a CPU run on these streams."""
    monkeypatch.setitem(BACKENDS, "cpu", replace(BACKENDS["cpu"], streams=streams))


@pytest.fixture(autouse=True)
def on_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu(monkeypatch, Inline)


def compiled(model: torch.nn.Module, strategy: weft.Strategy) -> weft.Program:
    return weft.compile(
        model,
        token_loss,
        adamw(model),
        token_batch(8),
        placement=weft.placement("cpu", [0, 1]),
        strategy=strategy,
    )


def executors(program: weft.Program) -> list[DeviceExecutor]:
    found = [each for each in program._core.executors.values() if isinstance(each, DeviceExecutor)]
    assert len(found) == len(program._core.executors)
    return found


@pytest.mark.parametrize("name", STRATEGIES)
def test_a_list_of_acts_trains_as_one_device(name: str) -> None:
    model = GPT()
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    with weft.local_world(2, timeout=30) as world:
        program = compiled(model, STRATEGIES[name])
        for seed in range(3):
            batch = token_batch(8, seed=seed)
            optimizer.zero_grad()
            expected = token_loss(plain, batch)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(program.step(batch), expected.detach(), rtol=0, atol=1e-10)
        assert executors(program)
        found = program.memory()[world.ranks[0]]
        assert found.measured is not None
        assert found.measured.peak <= found.predicted.peak * 1.02
        (last,) = {step.number for rank in program.trace() for step in rank.steps}
        assert last == 2


@pytest.mark.usefixtures("fake_cuda")
@pytest.mark.parametrize("name", STRATEGIES)
def test_every_act_comes_after_what_it_needs(name: str) -> None:
    with weft.local_world(2, timeout=30):
        program = compiled(GPT(), STRATEGIES[name])
        for _ in range(3):
            program.step(token_batch(8))
        plans = [executor.plan for executor in executors(program)]
        found = [executor._launches for executor in executors(program)]
    checked = 0
    for plan, acts, streams in zip(plans, found, Watched.every, strict=True):
        needs = dependencies_in_step(plan)
        place = {(launch.actor, launch.micro): launch.place for launch in acts}
        for step in range(3):
            before, ends = streams.before[step], streams.ends[step]
            for launch in acts:
                known = before[launch.place]
                own = needs[launch.actor, launch.micro]
                assert known >= {ends[place[act]] for act in own}
                checked += len(own)
                # A step comes after all of the one before.
                assert not step or known >= set(streams.ends[step - 1].values())
        foreign = sum(read.foreign for launch in acts for read in launch.reads)
        assert streams.kept == 3 * foreign > 0
    assert checked


@pytest.mark.usefixtures("fake_cuda")
def test_streams_do_not_wait_for_what_nobody_needs() -> None:
    """The gradients of a pipeline's last micro-batch are not waited for by its first one's."""
    with weft.local_world(2, timeout=30):
        program = compiled(GPT(), STRATEGIES["pipeline"])
        program.step(token_batch(8))
        acts = executors(program)[0]._launches
    streams = Watched.every[0]
    ends, before = streams.ends[0], streams.before[0]
    compute = [launch for launch in acts if launch.queue == "compute"]
    others = [launch for launch in acts if launch.queue != "compute"]
    free = [
        (launch, other)
        for launch in compute
        for other in others
        if other.place < launch.place and ends[other.place] not in before[launch.place]
    ]
    assert free


def test_an_order_must_hold_every_act_after_what_it_needs() -> None:
    with weft.local_world(2, timeout=30):
        executor = executors(compiled(GPT(), STRATEGIES["pipeline"]))[0]
        order = [(launch.actor, launch.micro) for launch in executor._launches]
        assert launches(executor.plan, executor._works, order) == executor._launches
        with pytest.raises(InternalError, match="not every act"):
            launches(executor.plan, executor._works, order[1:])
        with pytest.raises(
            InternalError,
            match=rf"rank {executor.plan.rank}: .* may not act now [^$]* waits in step 0",
        ):
            launches(executor.plan, executor._works, order[::-1])


@pytest.mark.one_process("it sets the clock")
@pytest.mark.usefixtures("fake_cuda")
def test_a_device_that_goes_on_is_not_accused(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(time, "sleep", lambda _: now.__setitem__(0, now[0] + 1))
    with weft.local_world(2, timeout=30):
        executor = executors(compiled(GPT(), STRATEGIES["data"]))[0]
    acts = executor._launches
    streams = CudaStreams(torch.device("cpu"), acts, 30, executor._act_text)
    FakeEvent.done = staticmethod(lambda event: event.number < now[0] / 8)
    for _ in range(3):  # the third waits for the first, an act of which ends every 16 s
        streams.begin()
        for launch in acts:
            streams.enter(launch)
            streams.leave(launch)
        streams.end(())
    assert now[0] > 30
    stuck = streams._before.ended[2].number
    FakeEvent.done = staticmethod(lambda event: event.number < stuck)
    named = executor._act_text(2).split(",")[0]
    with pytest.raises(RankFailure, match="finished no act for 30 s") as failure:
        streams.begin()
    assert named in str(failure.value)


@pytest.mark.usefixtures("fake_cuda")
def test_a_step_comes_after_the_one_before_on_whatever_stream(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    streams = CudaStreams(torch.device("cpu"), (), 30, str)
    for _ in range(2):
        caller = FakeStream()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device, own=caller: own)
        ended = streams._now.all.number
        streams.begin()
        assert ended < 0 or ended in caller.known
        streams.end(())
    assert streams._now.all.number in caller.known


NO_LUCK = r"rank 1: Feed .* failed in step 1: .*no luck"


def test_a_failing_act_is_named_and_ends_all(monkeypatch: pytest.MonkeyPatch) -> None:
    with weft.local_world(2, timeout=30):
        program = compiled(GPT(), STRATEGIES["data"])
        program.step(token_batch(8))
        executor = program._core.executors.get(1)

        def fail(*_: Any) -> Any:
            raise ValueError("no luck")

        if executor is not None:  # it is of this process
            monkeypatch.setattr(executor, "_act", fail)
        with pytest.raises(RankFailure, match=NO_LUCK if executor else "rank 1 failed.*no luck"):
            program.step(token_batch(8))
        # The next step is made by new executors.
        program.step(token_batch(8))
        assert executor is None or program._core.executors[1] is not executor


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("name", STRATEGIES)
def test_ranks_on_one_gpu_train_as_one_device(name: str) -> None:
    model = GPT().cuda()
    plain = copy.deepcopy(model)
    optimizer = adamw(plain)
    with weft.local_world(2, "cuda", timeout=60):
        program = weft.compile(
            model,
            token_loss,
            adamw(model),
            token_batch(8),
            placement=weft.placement("cuda", [0, 1]),
            strategy=STRATEGIES[name],
        )
        for seed in range(5):
            batch = token_batch(8, seed=seed)
            optimizer.zero_grad()
            expected = token_loss(plain, {key: leaf.cuda() for key, leaf in batch.items()})
            expected.backward()
            optimizer.step()
            found = program.step(batch)
            torch.testing.assert_close(found.cpu(), expected.detach().cpu(), rtol=0, atol=1e-9)
        for rank in program.trace():
            assert all(each.begin <= each.end for each in rank.slices)
            assert all(arrow.made <= arrow.read + 10_000 for arrow in rank.arrows)
