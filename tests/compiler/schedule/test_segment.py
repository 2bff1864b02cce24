"""Segments are as long as communication allows, and every actor names what it reads and writes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from drafts import drafted
from local_programs import all_reduce, call, program, training_step, update
from weft.compiler.schedule.segment import UNDER_WAY
from weft.ir.plan import Communicate, Communicator, Compute, Feed, Fetch, Hold, LocalProgram

GROUP = Communicator(0, (0, 1))


def actors_of(local: LocalProgram, bucket_bytes: int = 1) -> list[Any]:
    return list(drafted(local, bucket_bytes=bucket_bytes).actors)


def test_a_step_with_overlap() -> None:
    hold, feed, forward, first, rest, second, late, early, fetch = actors_of(training_step())
    assert isinstance(hold, Hold)
    assert hold.produces == ()
    assert isinstance(feed, Feed)
    assert feed.produces == ("x",)
    assert isinstance(forward, Compute)
    assert [node.outputs[0].name for node in forward.nodes] == ["h", "loss", "gw"]
    assert forward.consumes == ("v", "x", "w")
    assert forward.produces == ("loss", "gw")
    assert isinstance(first, Communicate)
    assert first.queue == "comm:0"
    assert isinstance(rest, Compute)
    assert rest.produces == ("gv",)
    assert isinstance(second, Communicate)
    assert isinstance(fetch, Fetch)
    # The gradient of w is reduced first, so w is updated first, while that of v is still on its way.
    assert late.produces == ("w",)
    assert early.produces == ("v",)
    assert [actor.id for actor in actors_of(training_step())] == list(range(9))


def test_without_communication_one_segment_is_left() -> None:
    local = program([call("loss", "x", "v"), call("g", "loss"), update("v", "g")])
    hold, _, step, _ = actors_of(local)
    assert hold.produces == ("w",)
    assert len(step.nodes) == 3
    assert step.produces == ("loss", "v")


def test_a_run_never_waits_for_what_its_own_nodes_must_send_first() -> None:
    local = program([call("a", "x"), all_reduce("s", "a"), call("b", "x"), call("loss", "s", "b")])
    names = [
        [node.outputs[0].name for node in actor.nodes]
        for actor in actors_of(local)
        if isinstance(actor, Compute)
    ]
    assert names == [["a"], ["b"], ["loss"]]


def test_what_one_bucket_brings_is_waited_for_once() -> None:
    _, _, _, gradients, updates, _ = actors_of(training_step(), 2**20)
    assert len(gradients.collectives) == 2
    assert updates.produces == ("v", "w")


def test_a_reader_of_a_view_reads_the_variable() -> None:
    nodes = [
        call("t", "v", op="aten.t.default"),
        call("a", "x", "t"),
        all_reduce("s", "a"),
        call("loss", "s", "t"),
        update("w", "s"),
    ]
    _, reader = (actor for actor in actors_of(program(nodes)) if isinstance(actor, Compute))
    assert {"t", "v"} <= set(reader.consumes)


def reduced_per_micro_batch(gradients: int) -> LocalProgram:
    """A backward with gradients that are reduced and added up over two micro-batches."""
    nodes, last, loop = [], "x", {"x", "loss"}
    for number in range(gradients):
        made, reduced = f"a{number}", f"g{number}"
        nodes += [call(made, last), all_reduce(reduced, made)]
        nodes.append(call(f"total{number}", reduced, op="weft.accumulate"))
        last, loop = made, loop | {made, reduced}
    nodes += [call("loss", last), update("v", "total0")]
    return replace(program(nodes), loop=frozenset(loop), micro_batches=2)


def test_a_backward_goes_on_while_a_few_of_its_gradients_are_reduced() -> None:
    """Otherwise the stage before waits, and the backward of the next micro-batch goes first meanwhile."""
    work = [a for a in actors_of(reduced_per_micro_batch(5)) if isinstance(a, Compute)]
    names = [[value.name for node in actor.nodes for value in node.makes] for actor in work]
    assert UNDER_WAY == 3
    assert names == [
        ["a0"],
        ["a1"],
        ["a2"],
        ["a3"],
        ["total0", "a4"],
        ["total1", "loss"],
        ["total2"],
        ["total3"],
        ["total4"],
        [],
    ]


def test_what_is_reduced_again_once_a_step_is_added_up_before() -> None:
    *nodes, step = reduced_per_micro_batch(1).nodes
    local = reduced_per_micro_batch(1)
    again = [*nodes, all_reduce("whole", "total0"), replace(step, source="whole")]
    actors = actors_of(local.with_nodes(again))
    assert [actor.produces for actor in actors if "total0" in actor.produces] == [("total0",)]
    made = next(actor.id for actor in actors if "total0" in actor.produces)
    read = next(actor.id for actor in actors if "total0" in actor.consumes)
    assert made < read
