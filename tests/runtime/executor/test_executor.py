"""Hand-written plans on ranks in this process: results, overlap, failures, silence, memory."""

from __future__ import annotations

import gc
import threading
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from build import ref
from two_stage_plans import call, value
from weft.compiler.schedule.credits import reuse_buffers
from weft.errors import BatchError, RankFailure
from weft.ir.plan import (
    Collective,
    Communicate,
    Communicator,
    Compute,
    Feed,
    Fetch,
    LocalInput,
    LocalUpdate,
    RankPlan,
    Register,
)
from weft.runtime.channels.local import LocalChannel
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.executor.work import Rank
from weft.runtime.kernels import local_ops
from weft.runtime.memory.state import Variables
from weft.runtime.world.world import TIMEOUT, local_world

pytestmark = pytest.mark.timeout(30)

BATCH, FEATURES = 8, 3


def regression(rank, size):
    """One step of linear regression, mean of squares, data parallel over `size` ranks, by SGD."""
    rows = BATCH // size
    x, y, w = value("x", rows, FEATURES), value("y", rows, 1), value("w", FEATURES, 1)
    error, gradient = value("error", rows, 1), value("gradient", FEATURES, 1)
    calls = (
        call("aten.mm.default", (ref("x"), ref("w")), value("out", rows, 1)),
        call("aten.sub.Tensor", (ref("out"), ref("y")), error),
        call("aten.mul.Tensor", (ref("error"), ref("error")), value("square", rows, 1)),
        call("aten.sum.default", (ref("square"),), value("sum")),
        call("aten.div.Tensor", (ref("sum"), BATCH), value("part")),
        call("aten.t.default", (ref("x"),), value("xt", FEATURES, rows)),
        call("aten.mm.default", (ref("xt"), ref("error")), value("half", FEATURES, 1)),
        call("aten.mul.Tensor", (ref("half"), 2 / BATCH), gradient),
    )
    collectives = (
        Collective("all_reduce", 0, value("part"), value("loss")),
        Collective("all_reduce", 0, gradient, value("total", FEATURES, 1)),
    )
    return RankPlan(
        rank,
        (LocalInput(w, "parameter", "w"), LocalInput(x, "batch", "x"), LocalInput(y, "batch", "y")),
        (
            Feed(0, ("x", "y"), ("x", "y")),
            Compute(1, calls, ("x", "y", "w"), ("part", "gradient")),
            Communicate(2, collectives, "comm:0"),
            Compute(3, (LocalUpdate("SGD", "w", "total", (), 0, "w"),), ("total",), ("w",)),
            Fetch(4, ("loss",), ("loss",)),
        ),
        (
            Register(x, "batch", 0, (1,), 2),
            Register(y, "batch", 0, (1,), 2),
            Register(value("part"), "activation", 1, (2,)),
            Register(gradient, "activation", 1, (2,)),
            Register(value("loss"), "communication", 2, (4,)),
            Register(value("total", FEATURES, 1), "communication", 2, (3,)),
            Register(w, "parameter", 3, (1,), 1, True),
        ),
    )


def executors(world, plans, variables, optimizer=None, timeout=TIMEOUT):
    communicator = Communicator(0, tuple(range(world.size)))
    channels = world.connect((communicator,))
    ranks = [
        Rank(plan, world.device(rank), channels[rank], variables[rank], optimizer)
        for rank, plan in enumerate(plans)
    ]
    return [ThreadExecutor(rank, timeout=timeout) for rank in ranks]


@pytest.mark.parametrize("size", [1, 2, 4])
def test_data_parallel_regression_equals_torch(size):
    generator = torch.Generator().manual_seed(0)
    x, y, start = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((BATCH, FEATURES), (BATCH, 1), (FEATURES, 1))
    )
    weight = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    expected = []
    for _ in range(5):
        loss = ((x @ weight - y) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        expected.append(loss.item())

    own = torch.nn.Parameter(start.clone())
    optimizer = torch.optim.SGD([own], lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    found = []
    with local_world(size, timeout=10) as world:
        variables = [Variables({"w": start.clone()}) for _ in world.ranks]
        plans = [regression(rank, size) for rank in world.ranks]
        every = executors(world, plans, variables, optimizer=optimizer, timeout=10)
        feeds = [{"x": a, "y": b} for a, b in zip(x.chunk(size), y.chunk(size), strict=True)]
        for _ in range(5):
            results = world.run(lambda rank: every[rank].step(feeds[rank]))
            assert len({result["loss"].item() for result in results}) == 1
            found.append(results[0]["loss"].item())
            schedule.step()
        for executor in every:
            executor.close()
    assert found == pytest.approx(expected, rel=1e-12)
    for shard in variables:
        torch.testing.assert_close(shard["w"], weight.detach(), rtol=1e-12, atol=0)
        assert set(shard) == {"w", "w.momentum_buffer"}
    assert own.grad is None


def relay(rank=0, later=()):
    """x -> double -> all_reduce "sum" -> fetch; `later` are calls on x by an actor that needs no communication."""
    x, y, z = (value(name, 2) for name in "xyz")
    after = value("after", 2)
    return RankPlan(
        rank,
        (LocalInput(x, "batch", "x"),),
        (
            Feed(0, ("x",), ("x",)),
            Compute(1, (call("aten.add.Tensor", (ref("x"), ref("x")), y),), ("x",), ("y",)),
            Communicate(2, (Collective("all_reduce", 0, y, z),), "comm:0"),
            Compute(3, (*later, call("aten.neg.default", (ref("x"),), after)), ("x",), ("after",)),
            Fetch(4, ("z", "after"), ("z", "after")),
        ),
        (
            Register(x, "batch", 0, (1, 3), 2),
            Register(y, "activation", 1, (2,)),
            Register(z, "communication", 2, (4,)),
            Register(after, "activation", 3, (4,)),
        ),
    )


def probe(monkeypatch, function):
    """Make the op "weft.hint" call `function` when it runs."""

    def hint(x, sbp=None):
        function()
        return x

    monkeypatch.setitem(local_ops.LOCAL_OPS, "weft.hint", hint)
    return call("weft.hint", (ref("x"), ""), value("same", 2))


class SlowChannel:
    """A channel whose all_reduce ends only after `release` is set."""

    ranks, index, size, rank = (0, 1), 0, 2, 0
    interruptible = True

    def __init__(self):
        self.entered, self.release = threading.Event(), threading.Event()
        self.failure = None

    def all_reduce(self, tensor, reduction):
        self.entered.set()
        if not self.release.wait(20):
            raise TimeoutError("compute did not go on meanwhile")
        if self.failure is not None:
            raise self.failure
        return tensor

    def counting(self, kind):
        return nullcontext()

    def compare(self):
        pass

    def abort(self, error):
        self.failure = error
        self.release.set()

    def watch(self, fail):
        pass

    def close(self):
        pass


def test_compute_goes_on_while_a_collective_runs(monkeypatch):
    """The collective ends only when a later compute actor lets it, which in turn waits until it has begun."""
    channel = SlowChannel()

    def later():
        assert channel.entered.wait(20)
        channel.release.set()

    plan = relay(later=(probe(monkeypatch, later),))
    with ThreadExecutor(
        Rank(plan, torch.device("cpu"), {0: channel}, Variables()), timeout=10
    ) as executor:
        result = executor.step({"x": torch.ones(2)})
    assert result["z"].tolist() == [2, 2]
    assert result["after"].tolist() == [-1, -1]


def test_a_collective_for_which_all_wait_runs_on_the_compute_thread(monkeypatch):
    threads = []
    all_reduce = LocalChannel._all_reduce

    def noting(channel, tensors, reduction):
        threads.append((channel.rank, threading.current_thread().name, channel.spins))
        all_reduce(channel, tensors, reduction)

    monkeypatch.setattr(LocalChannel, "_all_reduce", noting)
    double = torch.float64
    feed = {"x": torch.ones(4, FEATURES, dtype=double), "y": torch.ones(4, 1, dtype=double)}
    weights = [torch.zeros(FEATURES, 1, dtype=double) for _ in range(2)]
    optimizers = [torch.optim.SGD([torch.nn.Parameter(weight)], lr=0.1) for weight in weights]
    with local_world(2, timeout=20) as world:
        channels = world.connect((Communicator(0, (0, 1)),))
        every = [
            ThreadExecutor(
                Rank(
                    regression(rank, 2),
                    torch.device("cpu"),
                    channels[rank],
                    Variables({"w": weights[rank]}),
                    optimizer=optimizers[rank],
                )
            )
            for rank in range(2)
        ]
        for _ in range(3):
            world.run(lambda rank: every[rank].step(feed))
        for executor in every:
            executor.close()
    assert {name for _, name, _ in threads} == {"MainThread", "weft rank 1"}
    assert all(spins for *_, spins in threads)


def test_a_failing_actor_ends_all_ranks_with_the_first_error(monkeypatch):
    def fail():
        if threading.current_thread().name == "weft rank 1":
            raise ZeroDivisionError("seven is too many")

    plans = [relay(rank, (probe(monkeypatch, fail),)) for rank in range(3)]
    with local_world(3, timeout=20) as world:
        every = executors(world, plans, [Variables() for _ in plans], timeout=20)
        feed = {"x": torch.ones(2)}
        with pytest.raises(
            RankFailure, match=r"rank 1: Compute 3 .*ZeroDivisionError: seven"
        ) as caught:
            world.run(lambda rank: every[rank].step(feed))
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(RankFailure, match="already failed"):
            every[1].step(feed)
        for executor in every:
            executor.close()


def test_a_rank_inside_a_collective_is_woken_and_names_the_rank_that_failed():
    """Rank 1 has no tensor to add, so it never comes to the collective."""
    with local_world(2, timeout=20) as world:
        every = executors(world, [relay(0), relay(1)], [Variables(), Variables()], timeout=20)
        errors = {}

        def step(rank):
            try:
                every[rank].step({"x": torch.ones(2) if rank == 0 else None})
            except RankFailure as error:
                errors[rank] = str(error)

        world.run(step)
        for executor in every:
            executor.close()
    assert "rank 1: Compute 1 on compute (aten.add.Tensor) failed in step 0" in errors[1]
    assert "rank 0: Communicate 2 on comm:0 (all_reduce of y) failed in step 0" in errors[0]
    assert "rank 1 failed: RuntimeError" in errors[0]


def test_an_interrupt_wakes_the_other_ranks(monkeypatch):
    def interrupt():
        if threading.current_thread() is threading.main_thread():
            raise KeyboardInterrupt

    plans = [relay(rank, (probe(monkeypatch, interrupt),)) for rank in range(2)]
    with local_world(2, timeout=20) as world:
        every = executors(world, plans, [Variables() for _ in plans], timeout=20)
        with pytest.raises(KeyboardInterrupt):
            world.run(lambda rank: every[rank].step({"x": torch.ones(2)}))
        for executor in every:
            executor.close()


def test_silence_is_reported_with_who_waits_for_whom():
    channel = SlowChannel()
    with (
        ThreadExecutor(
            Rank(relay(), torch.device("cpu"), {0: channel}, Variables()), timeout=0.2
        ) as executor,
        pytest.raises(RankFailure) as caught,
    ):
        executor.step({"x": torch.ones(2)})
    text = str(caught.value)
    assert "rank 0: nothing happened for 0.2 s" in text
    assert "Communicate 2 on comm:0 (all_reduce of y) acts for step 0" in text
    assert "Fetch 4 on host waits in step 0 for z from Communicate 2 on comm:0" in text
    assert "Communicate 2 on comm:0 (all_reduce of y) waits for ranks [1]" in text


def test_a_missing_rank_is_named():
    with local_world(3, timeout=0.2) as world:
        every = executors(world, [relay(rank) for rank in range(3)], [Variables()] * 3, timeout=20)
        with pytest.raises(RankFailure, match=r"waited 0.2 s in all_reduce for ranks \[2\]"):
            world.run(lambda rank: every[rank].step({"x": torch.ones(2)}) if rank < 2 else None)
        for executor in every:
            executor.close()


def test_a_batch_without_a_leaf_is_refused_and_does_no_harm():
    with local_world(1) as world:
        (executor,) = executors(world, [relay()], [Variables()])
        with executor:
            with pytest.raises(BatchError, match=r"the batch has no x; it has \['y'\]"):
                executor.step({"y": torch.ones(2)})
            assert executor.step({"x": torch.ones(2)})["z"].tolist() == [2, 2]


def test_tensors_are_released_with_their_last_reader(monkeypatch):
    """While the last actor runs, what only earlier actors read is gone already; after the step, all is."""
    alive: list[Any] = []
    seen: list[Any] = []
    original = torch.ops.aten.add.Tensor

    def look():
        gc.collect()
        seen.append([reference() is not None for reference in alive])

    def remember(a, b):
        result = original(a, b)
        alive.append(weakref.ref(result))
        return result

    monkeypatch.setitem(local_ops.LOCAL_OPS, "weft.remember", remember)
    x, y, z = (value(name, 2) for name in "xyz")
    plan = RankPlan(
        0,
        (LocalInput(x, "batch", "x"),),
        (
            Feed(0, ("x",), ("x",)),
            Compute(1, (call("weft.remember", (ref("x"), ref("x")), y),), ("x",), ("y",)),
            Compute(2, (call("aten.neg.default", (ref("y"),), z),), ("y",), ("z",)),
            Compute(3, (probe(monkeypatch, look),), ("x", "z"), ()),
            Fetch(4, ("z",), ("z",)),
        ),
        (
            Register(x, "batch", 0, (1, 3), 2),
            Register(y, "activation", 1, (2,)),
            Register(z, "activation", 2, (3, 4)),
        ),
    )
    with ThreadExecutor(Rank(plan, torch.device("cpu"), {}, Variables()), timeout=10) as executor:
        batch = torch.ones(2)
        alive.append(weakref.ref(batch))
        result = executor.step({"x": batch})
        assert seen == [[True, False]]
        alive.append(weakref.ref(result["z"]))
        del batch, result
        gc.collect()
        assert [reference() is not None for reference in alive] == [False] * 3


def test_autocast_of_the_caller_does_not_reach_the_kernels():
    with local_world(1) as world:
        (executor,) = executors(
            world, [regression(0, 1)], [Variables({"w": torch.ones(FEATURES, 1)})],
            optimizer=torch.optim.SGD([torch.ones(1)], lr=0.0),
        )  # fmt: skip
        batch = {"x": torch.full((BATCH, FEATURES), 1.001), "y": torch.zeros(BATCH, 1)}
        with executor, torch.autocast("cpu", torch.bfloat16):
            loss = executor.step(batch)["loss"]
    assert loss.item() == pytest.approx((3 * 1.001) ** 2, rel=1e-6)


def test_updates_that_read_each_other_and_results_that_are_variables():
    """a and b change places; the step returns a itself and a view of b, as they were in that step."""
    a, b, view = (value(name, 2) for name in ("a", "b", "view"))
    nodes = (
        call("weft.slice", (ref("b"), 0, 0, 2), view),
        LocalUpdate("copy", "a", "b", (), 0, "a"),
        LocalUpdate("copy", "b", "a", (), 0, "b"),
    )
    plan = RankPlan(
        0,
        (LocalInput(a, "buffer", "a"), LocalInput(b, "buffer", "b")),
        (
            Compute(0, nodes, (), ("view", "a", "b")),
            Fetch(1, ("a",), ("a",)),
            Fetch(2, ("view",), ("view",)),
        ),
        (
            Register(view, "activation", 0, (2,)),
            Register(a, "buffer", 0, (1,), 1, True),
            Register(b, "buffer", 0, (), 1, True),
        ),
    )
    variables = Variables({"a": torch.ones(2), "b": torch.zeros(2)})
    with ThreadExecutor(
        Rank(reuse_buffers(plan), torch.device("cpu"), {}, variables), timeout=10
    ) as executor:
        results = [executor.step({}) for _ in range(2)]
    assert [result["a"].tolist() for result in results] == [[1, 1], [0, 0]]
    assert [result["view"].tolist() for result in results] == [[0, 0], [1, 1]]
    assert variables["a"].tolist() == [1, 1]
