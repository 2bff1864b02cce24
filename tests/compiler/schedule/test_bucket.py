"""Bucketing joins all-reduces, never past a reader, never past the size, never across communicators."""

from __future__ import annotations

from dataclasses import replace

import pytest

from build import value
from drafts import drafted
from local_programs import (
    all_reduce,
    call,
    gather,
    program,
    reduce_scatter,
    training_step,
    update,
)
from weft.compiler.schedule.bucket import CUTS, GATHERED, bucket
from weft.compiler.schedule.draft import Bucket
from weft.ir.plan import Collective, LocalInput, LocalNode, LocalOutput, LocalProgram
from weft.ops.signatures import BLANK

LARGE = 2**20


def shown(local: LocalProgram, bucket_bytes: int) -> list[object]:
    """Buckets as the list of what they make, other items as their kind."""
    schedule = drafted(local, bucket, bucket_bytes=bucket_bytes).schedule
    return [
        [collective.output.name for collective in item.collectives]
        if isinstance(item, Bucket)
        else type(item).__name__
        for item in schedule
    ]


def test_gradients_are_joined_and_run_before_the_first_update() -> None:
    calls = ["LocalCall"] * 5
    updates = ["LocalUpdate"] * 2
    assert shown(training_step(), LARGE) == [*calls, ["gw.sum", "gv.sum"], *updates]


def test_a_full_bucket_starts_at_once() -> None:
    items = shown(training_step(), 16)
    assert items.index(["gw.sum"]) == 3
    assert items.index(["gv.sum"]) == 6


def test_a_reader_closes_the_bucket() -> None:
    nodes = [call("a", "x"), all_reduce("s", "a"), call("loss", "s"), all_reduce("t", "a")]
    assert shown(program(nodes), LARGE) == ["LocalCall", ["s"], "LocalCall", ["t"]]


def test_communicators_are_not_mixed() -> None:
    nodes = [call("a", "x"), all_reduce("s", "a", 0), all_reduce("t", "a", 1)]
    assert shown(program(nodes), LARGE) == ["LocalCall", ["s"], ["t"]]


def test_another_collective_keeps_its_place_on_the_communicator() -> None:
    nodes = [call("a", "x"), all_reduce("s", "a"), gather("g", "a"), all_reduce("t", "a")]
    assert shown(program(nodes), LARGE) == ["LocalCall", ["s"], ["g"], ["t"]]


def test_gathers_of_parameters_are_joined() -> None:
    """Until the first of them is read; what depends on the batch is gathered alone."""
    nodes = [
        gather("v.whole", "v"),
        gather("w.whole", "w"),
        call("h", "x", "v.whole"),
        gather("h.whole", "h"),
        call("loss", "h.whole", "w.whole"),
    ]
    items = shown(program(nodes), LARGE)
    assert items == [["v.whole", "w.whole"], "LocalCall", ["h.whole"], "LocalCall"]


def test_sharded_gradients_are_joined() -> None:
    nodes = [
        call("gv", "x"),
        reduce_scatter("gv.own", "gv"),
        call("gw", "x"),
        reduce_scatter("gw.own", "gw"),
        update("v", "gv.own"),
    ]
    calls = ["LocalCall"] * 2
    assert shown(program(nodes), LARGE) == [*calls, ["gv.own", "gw.own"], "LocalUpdate"]
    small = shown(program(nodes), 32)
    assert small == ["LocalCall", ["gv.own"], "LocalCall", ["gw.own"], "LocalUpdate"]


def test_gathers_may_be_larger() -> None:
    nodes = [gather("v.whole", "v"), gather("w.whole", "w"), call("h", "v.whole", "w.whole")]
    each = 16
    assert shown(program(nodes), each) == [["v.whole", "w.whole"], "LocalCall"]
    apart = shown(program(nodes), each // GATHERED)
    assert apart == [["v.whole"], ["w.whole"], "LocalCall"]


def test_sums_over_micro_batches_are_reduced_in_few_buckets() -> None:
    nodes = [all_reduce(f"r{number}", f"g{number}") for number in range(4 * CUTS)]
    local = program(nodes, outputs=())
    assert len(shown(local, 1)) == 4 * CUTS
    assert len(shown(replace(local, micro_batches=2, loop=frozenset("h")), 1)) == CUTS


def of_micro_batches(gradients: int, op: str = "weft.accumulate") -> LocalProgram:
    """Gradients that are reduced and added up in each of two micro-batches, with a cast before the sum."""
    nodes: list[LocalNode] = []
    for number in range(gradients):
        nodes += [call(f"g{number}", "x"), reduce_scatter(f"own{number}", f"g{number}")]
        nodes += [call(f"wide{number}", f"own{number}")]
        total = call(f"total{number}", f"wide{number}", op=op)
        nodes += [
            total.changed(args=(*total.args, (), "weft.accumulate")) if op == BLANK else total
        ]
    nodes += [update("v", "total0"), update("w", f"total{gradients - 1}")]
    each = frozenset(
        f"{name}{number}" for name in ("g", "own", "wide") for number in range(gradients)
    )
    return replace(program(nodes, outputs=()), micro_batches=2, loop=each | {"x"})


@pytest.mark.parametrize("op", ["weft.accumulate", BLANK])
def test_gradients_of_each_micro_batch_are_joined_and_then_added_up(op: str) -> None:
    """Also on a rank without elements, where `weft.blank` stands in place of the sum."""
    large = LARGE**2  # so that the bucket of an act is larger than all of it
    found = shown(of_micro_batches(3, op), large)
    calls, updates = ["LocalCall"] * 3, ["LocalUpdate"] * 2
    assert found == [*calls, ["own0", "own1", "own2"], *(2 * calls), *updates]


def test_a_value_that_is_not_only_added_up_closes_its_bucket() -> None:
    local = of_micro_batches(2)
    norm = call("norm", "wide0")
    first = local.nodes.index(next(node for node in local.nodes if node.makes[0].name == "wide0"))
    nodes = (*local.nodes[: first + 1], norm, *local.nodes[first + 1 :])
    found = shown(replace(local, nodes=nodes), LARGE**2)
    assert found.index(["own0"]) == 1
    assert ["own1"] in found


def test_buckets_of_each_micro_batch_leave_little_for_its_end() -> None:
    """16 gradients of 32 bytes: with a limit of 640 a latency takes as long as 32, and the mean of both is 128."""
    found = shown(of_micro_batches(16), 640)
    buckets = [each for each in found if isinstance(each, list)]
    assert [len(each) for each in buckets] == [4, 4, 4, 4]


def test_sums_of_a_batch_norm_go_at_once_and_alone() -> None:
    """The next call reads them; gradients that wait for others go on waiting."""
    nodes = [
        call("gv", "x"),
        all_reduce("gv.sum", "gv"),
        call("m", "x", op="weft.batch_norm_sums"),
        all_reduce("m.sum", "m"),
        call("gw", "m.sum"),
        all_reduce("gw.sum", "gw"),
        update("v", "gv.sum"),
    ]
    calls = ["LocalCall"] * 2
    found = shown(program(nodes), LARGE)
    assert found == [*calls, ["m.sum"], "LocalCall", ["gv.sum", "gw.sum"], "LocalUpdate"]


def uneven_gathers(rows: int) -> LocalProgram:
    """Parameters of 9 rows in shards of 5 and 4, gathered on the rank that has `rows` of them."""
    names = [f"p{number}" for number in range(8)]
    inputs = tuple(LocalInput(value(name, rows), "parameter", name) for name in names)
    gathers = [
        Collective(
            "all_gather", 0, each.value, value(f"{each.key}.whole", 9), sizes=(5, 4), bytes=36
        )
        for each in inputs
    ]
    reads = call("loss", *(f"{name}.whole" for name in names))
    return LocalProgram(0, inputs, (*gathers, reads), (LocalOutput("loss", "loss"),))


@pytest.mark.parametrize("bucket_bytes", [4, 8, 10, 12, 16])
def test_ranks_with_uneven_shards_join_alike(bucket_bytes: int) -> None:
    one, other = (shown(uneven_gathers(rows), bucket_bytes) for rows in (5, 4))
    assert one == other
    assert len(one) > 1


def test_a_rank_without_elements_reduces_alone_what_others_do() -> None:
    """`weft.blank` stands there in place of the op whose result is wanted at once."""
    blank = call("sums", "x", op="weft.blank").changed(args=((), (), "weft.batch_norm_sums"))
    sums = call("sums", "x", op="weft.batch_norm_sums")
    rest = [all_reduce("sums.whole", "sums"), call("a", "x"), all_reduce("s", "a")]
    assert shown(program([blank, *rest]), LARGE) == shown(program([sums, *rest]), LARGE)
