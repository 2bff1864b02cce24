"""Hand-written plans of micro-batches: accumulation, packing, buffers in the loop, pipelines of two ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from build import ref
from two_stage_plans import (
    BACK,
    FORTH,
    ROWS,
    WIDTH,
    M,
    accumulate,
    call,
    each,
    first_stage,
    last_stage,
    loop,
    numbers,
    orders,
    plain_steps,
    select,
    value,
)
from weft.errors import InternalError, RankFailure
from weft.ir.legal.plans import verify_communicators
from weft.ir.logical import PerMicroBatch
from weft.ir.plan import (
    Collective,
    Communicate,
    Communicator,
    Compute,
    Feed,
    Fetch,
    LocalInput,
    LocalUpdate,
    Order,
    RankPlan,
    Register,
)
from weft.runtime.executor.threads import ThreadExecutor
from weft.runtime.executor.work import Rank
from weft.runtime.kernels import local_ops
from weft.runtime.memory.state import Variables
from weft.runtime.world.world import local_world

pytestmark = pytest.mark.timeout(30)

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("reduction", "expected"),
    [("sum", torch.sum), ("max", torch.amax), ("min", torch.amin), ("prod", torch.prod)],
)
def test_accumulate_and_pack_make_one_value_of_all_micro_batches(reduction, expected):
    x, part, twice = value("x", M, ROWS), value("part", ROWS), value("twice", ROWS)
    total, rows = value("total", ROWS), value("rows", M * ROWS)
    nodes = (
        select("x", part),
        call("aten.add.Tensor", (ref("part"), ref("part")), twice),
        accumulate("twice", total, reduction),
        call("weft.pack", (ref("part"), 0), rows),
    )
    plan = RankPlan(
        0,
        (LocalInput(x, "batch", "x"),),
        (
            Feed(0, ("x",), ("x",)),
            loop(1, nodes, ("x",), ("total", "rows")),
            Fetch(2, ("total", "rows"), ("total", "rows")),
        ),
        (
            Register(x, "batch", 0, (1,), 2),
            Register(total, "gradient", 1, (2,)),
            Register(rows, "activation", 1, (2,)),
        ),
        M,
    )
    with ThreadExecutor(Rank(plan, CPU, {}, Variables()), timeout=10) as executor:
        for step in range(3):
            batch = numbers(M, ROWS, seed=step)
            found = executor.step({"x": batch.clone()})
            torch.testing.assert_close(found["rows"], batch.view(-1))
            torch.testing.assert_close(found["total"], expected(batch * 2, dim=0))


def test_accumulation_never_writes_what_others_read():
    """The first micro-batch's value is a view of the batch, or is packed too: the total must be a copy."""
    x, part, sign = value("x", M, ROWS), value("part", ROWS), value("sign", ROWS)
    a, b, rows = value("a", ROWS), value("b", ROWS), value("rows", M * ROWS)
    nodes = (
        select("x", part),
        accumulate("part", a),
        call("aten.neg.default", (ref("part"),), sign),
        accumulate("sign", b),
        call("weft.pack", (ref("sign"), 0), rows),
    )
    plan = RankPlan(
        0,
        (LocalInput(x, "batch", "x"),),
        (
            Feed(0, ("x",), ("x",)),
            loop(1, nodes, ("x",), ("a", "b", "rows")),
            Fetch(2, ("a", "b", "rows"), ("a", "b", "rows")),
        ),
        (
            Register(x, "batch", 0, (1,)),
            *(Register(v, "gradient", 1, (2,)) for v in (a, b, rows)),
        ),
        M,
    )
    batch = numbers(M, ROWS)
    given = batch.clone()
    with ThreadExecutor(Rank(plan, CPU, {}, Variables()), timeout=10) as executor:
        found = executor.step({"x": given})
    torch.testing.assert_close(given, batch, rtol=0, atol=0)
    torch.testing.assert_close(found["rows"], -batch.view(-1), rtol=0, atol=0)
    torch.testing.assert_close(found["a"], batch.sum(0))
    torch.testing.assert_close(found["b"], -batch.sum(0))


def test_a_buffer_is_updated_in_each_micro_batch_and_a_parameter_once():
    """mean = 0.9 mean + 0.1 x for each micro-batch; w takes the sum of what the micro-batches saw of it."""
    x, part, mean, w = (
        value("x", M, ROWS), value("part", ROWS), value("mean", ROWS), value("w", ROWS),
    )  # fmt: skip
    moved, seen, total = value("moved", ROWS), value("seen", ROWS), value("total", ROWS)
    plan = RankPlan(
        0,
        (
            LocalInput(w, "parameter", "w"),
            LocalInput(mean, "buffer", "mean"),
            LocalInput(x, "batch", "x"),
        ),
        (
            Feed(0, ("x",), ("x",)),
            loop(1, (select("x", part), call("aten.lerp.Scalar", (ref("mean"), ref("part"), 0.1), moved)),
                 ("x", "mean"), ("moved",)),
            loop(2, (call("aten.mul.Tensor", (ref("mean"), ref("w")), seen), accumulate("seen", total)),
                 ("mean", "w"), ("total",)),
            loop(3, (LocalUpdate("copy", "mean", "moved", (), 0, "mean"),), ("moved",), ("mean",)),
            Compute(4, (LocalUpdate("copy", "w", "total", (), 0, "w"),), ("total",), ("w",)),
        ),
        (
            Register(x, "batch", 0, (1,)),
            each(moved, 1, (3,)),
            each(mean, 3, (1, 2), 1, "buffer", True),
            Register(total, "gradient", 2, (4,)),
            Register(w, "parameter", 4, (2,), 1, True),
        ),
        M,
    )  # fmt: skip
    start, weight = numbers(ROWS, seed=1), numbers(ROWS, seed=2)
    variables = Variables({"mean": start.clone(), "w": weight.clone()})
    with ThreadExecutor(Rank(plan, CPU, {}, variables), timeout=10) as executor:
        for step in range(3):
            batch = numbers(M, ROWS, seed=step)
            executor.step({"x": batch})
            total = torch.zeros_like(weight)
            for part in batch:
                total += start * weight
                start = start.lerp(part, 0.1)
            weight = total
    torch.testing.assert_close(variables["mean"], start)
    torch.testing.assert_close(variables["w"], weight)


def test_random_numbers_differ_between_micro_batches_and_are_those_of_the_whole_batch():
    draw, whole = value("draw", ROWS), value("whole", M * ROWS)
    offset = (PerMicroBatch(tuple(range(0, M * ROWS, ROWS))),)
    nodes = (
        call("weft.uniform", ((M * ROWS,), offset, (ROWS,), 7), draw),
        call("weft.pack", (ref("draw"), 0), whole),
    )
    plan = RankPlan(
        0, (), (loop(0, nodes, (), ("whole",)), Fetch(1, ("whole",), ("whole",))),
        (Register(whole, "activation", 0, (1,)),), M,
    )  # fmt: skip
    once = call("weft.uniform", ((M * ROWS,), (0,), (M * ROWS,), 7), whole)
    alone = RankPlan(
        0, (), (Compute(0, (once,), (), ("whole",)), Fetch(1, ("whole",), ("whole",))),
        (Register(whole, "activation", 0, (1,)),),
    )  # fmt: skip
    found = []
    for each_plan in (plan, alone):
        with ThreadExecutor(Rank(each_plan, CPU, {}, Variables(), seed=3), timeout=10) as executor:
            found.append([executor.step({})["whole"] for _ in range(2)])
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)
    assert found[0][0].unique().numel() == M * ROWS


def pipeline(world, plans, variables, optimizer=None, timeout=10):
    channels = world.connect((FORTH, BACK))
    for plan in plans:
        verify_communicators(plan, (FORTH, BACK))
    return [
        ThreadExecutor(
            Rank(plan, CPU, channels[rank], variables[rank], optimizer=optimizer), timeout=timeout
        )
        for rank, plan in enumerate(plans)
    ]


@pytest.mark.parametrize(
    ("credits", "backward_first"),
    [((M, M), False), ((2, 1), True), ((1, 1), True), ((M, 2), True)],
    ids=["gpipe", "1f1b", "one at a time", "between"],
)
def test_a_pipeline_of_two_ranks_equals_one_device(credits, backward_first):
    a, b = numbers(WIDTH, WIDTH, seed=1), numbers(WIDTH, WIDTH, seed=2)
    batches = [numbers(M, ROWS, WIDTH, seed=step) for step in range(3)]
    variables = [Variables({"a": a.clone()}), Variables({"b": b.clone()})]
    plans = [first_stage(credits[0], backward_first), last_stage(credits[1], backward_first)]
    optimizer = torch.optim.SGD([torch.nn.Parameter(a.clone())], lr=0.01, momentum=0.5)
    found = []
    with local_world(2, timeout=10) as world:
        every = pipeline(world, plans, variables, optimizer)
        for batch in batches:
            feeds: Any = ({"x": batch}, {})
            results = world.run(lambda rank, feeds=feeds: every[rank].step(feeds[rank]))
            found.append(results[1]["loss"])
        for executor in every:
            executor.close()
    expected = plain_steps(batches, a, b)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(variables[0]["a"], a, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(variables[1]["b"], b, rtol=1e-12, atol=1e-12)


def test_credits_bound_what_is_in_flight(monkeypatch):
    """Rank 0 may be ahead of its backward by as many micro-batches as `part` has copies."""
    for credits in (1, 2, M):
        ahead = 0
        log: list[Any] = []

        def note(x, kind, log=log):
            log.append(kind)
            return x

        monkeypatch.setitem(local_ops.LOCAL_OPS, "weft.note", note)

        def probe(kind, name):
            return (call("weft.note", (ref(name), kind), value(f"seen_{kind}")),)

        plans = [first_stage(credits, True), last_stage(1, True)]
        actors = list(plans[0].actors)
        for id, kind in ((1, "F"), (4, "B")):
            nodes = (*actors[id].nodes, *probe(kind, "part"))
            actors[id] = loop(
                id, nodes, actors[id].consumes, actors[id].produces, actors[id].priority
            )
        plans[0] = RankPlan(
            0, plans[0].inputs, tuple(actors), plans[0].registers, M, plans[0].orders
        )
        variables = [Variables({n: torch.eye(WIDTH, dtype=torch.float64)}) for n in "ab"]
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.0)
        with local_world(2, timeout=10) as world:
            every = pipeline(world, plans, variables, optimizer)
            feeds: Any = ({"x": numbers(M, ROWS, WIDTH)}, {})
            world.run(lambda rank, every=every, feeds=feeds: every[rank].step(feeds[rank]))
            for executor in every:
                executor.close()
        assert sorted(log) == ["B"] * M + ["F"] * M
        for index in range(len(log)):
            done = log[: index + 1]
            ahead = max(ahead, done.count("F") - done.count("B"))
        assert ahead <= credits
        if credits == 1:
            assert log == ["F", "B"] * M


def test_a_peer_that_never_sends_is_named():
    """Rank 1 never sends `dy` back: rank 0 says so, with actor, register and peer, and what waits for it."""
    first, last = first_stage(2, True), last_stage(1, True)
    silent = RankPlan(
        1,
        last.inputs,
        (last.actors[0], loop(1, (), ("y",), ()), Fetch(2, (), ())),
        (each(value("y", ROWS, WIDTH), 0, (1,), 1, "communication"),),
        M,
        orders(last.actors[0]),
    )
    variables = [Variables({"a": torch.ones(WIDTH, WIDTH, dtype=torch.float64)}), Variables()]
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
    with local_world(2, timeout=10) as world:
        every = pipeline(world, (first, silent), variables, optimizer, timeout=0.3)
        with pytest.raises(RankFailure) as caught:
            world.run(
                lambda rank: every[rank].step({"x": numbers(M, ROWS, WIDTH)} if not rank else {})
            )
        for executor in every:
            executor.close()
    text = str(caught.value)
    assert text.splitlines()[0] == (
        "rank 0: nothing happened for 0.3 s; everything waits for Communicate 3 on comm:1 "
        "(transfer into dy), which waits for ranks [1] in step 0, micro-batch 0"
    )
    assert "Compute 4 on compute (aten.t.default +2) waits in step 0, micro-batch 0 for dy" in text


def test_control_registers_hold_actors_back(monkeypatch):
    """Act m of the second actor waits for act m - 1 of the third, through a register without a tensor."""
    log = []

    def note(x, kind):
        log.append(kind)
        return x.clone()

    monkeypatch.setitem(local_ops.LOCAL_OPS, "weft.note", note)
    x, part, went = value("x", M, ROWS), value("part", ROWS), value("went", ROWS)
    go, end = value("go", 0, dtype="bool"), value("end", ROWS)
    gathered = value("gathered", ROWS)
    gather = Collective("all_reduce", 0, went, gathered)
    plan = RankPlan(
        0,
        (LocalInput(x, "batch", "x"),),
        (
            Feed(0, ("x",), ("x",)),
            loop(1, (select("x", part), call("weft.note", (ref("part"), "make"), went)), ("x",), ("went",)),
            Communicate(2, (gather,), "comm:0", M, waits=("go",)),
            loop(3, (call("weft.note", (ref("gathered"), "use"), value("used", ROWS)), accumulate("used", end)),
                 ("gathered",), ("end", "go"), -1),
            Fetch(4, ("end",), ("end",)),
        ),
        (
            Register(x, "batch", 0, (1,)),
            each(went, 1, (2,), M),
            each(gathered, 2, (3,), M, "communication"),
            each(go, 3, (2,), 1, "control", True),
            Register(end, "gradient", 3, (4,)),
        ),
        M,
        (Order("comm:0", tuple((2, micro) for micro in range(M))),),
    )  # fmt: skip
    batch = numbers(M, ROWS)
    with local_world(1, timeout=10) as world:
        channels = world.connect((Communicator(0, (0,)),))
        with ThreadExecutor(Rank(plan, CPU, channels[0], Variables()), timeout=10) as executor:
            for _ in range(2):
                torch.testing.assert_close(executor.step({"x": batch})["end"], batch.sum(0))
    assert log.count("use") == log.count("make") == 2 * M


def test_a_queue_without_an_order_for_its_micro_batches_is_refused():
    plan = first_stage(1, True)
    without = RankPlan(0, plan.inputs, plan.actors, plan.registers, M)
    with local_world(2, timeout=10) as world:
        channels = world.connect((FORTH, BACK))
        variables = Variables({"a": torch.ones(WIDTH, WIDTH, dtype=torch.float64)})
        optimizer = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1)
        with pytest.raises(
            InternalError, match="no order is given for the micro-batches of comm:0"
        ):
            ThreadExecutor(Rank(without, CPU, channels[0], variables, optimizer=optimizer))


def test_a_rank_that_waits_in_a_circle_says_so():
    """The second actor needs the total of all micro-batches, but keeps the only copy of `part` until then."""
    x, part, total = value("x", M, ROWS), value("part", ROWS), value("total", ROWS)
    both = call("aten.add.Tensor", (ref("part"), ref("total")), value("both", ROWS))
    plan = RankPlan(
        0,
        (LocalInput(x, "batch", "x"),),
        (
            Feed(0, ("x",), ("x",)),
            loop(1, (select("x", part), accumulate("part", total)), ("x",), ("part", "total")),
            loop(2, (both,), ("part", "total"), ()),
        ),
        (Register(x, "batch", 0, (1,)), each(part, 1, (2,)), Register(total, "gradient", 1, (2,))),
        M,
    )
    with (
        ThreadExecutor(Rank(plan, CPU, {}, Variables()), timeout=0.2) as executor,
        pytest.raises(RankFailure) as caught,
    ):
        executor.step({"x": numbers(M, ROWS)})
    assert str(caught.value).splitlines()[0] == (
        "rank 0: nothing happened for 0.2 s; each of Compute 1 on compute (aten.select.int +1), "
        "Compute 2 on compute (aten.add.Tensor) waits for the next one"
    )
