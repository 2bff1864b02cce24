"""Which segments become CUDA graphs: where launching takes longer than computing, and nothing is in the way."""

from __future__ import annotations

from dataclasses import replace

import pytest

from build import ref
from weft.compiler.plans.specialize import FEWEST_LAUNCHES, segment_launches, with_cuda_graphs
from weft.hardware import default_device
from weft.ir.plan import (
    Compute,
    GraphedRun,
    GraphMode,
    LocalCall,
    LocalInput,
    LocalProgram,
    LocalUpdate,
    LocalValue,
    RankPlan,
)
from weft.runtime.devices.cuda_graphs import capture_obstacle


def calls(op: str, count: int, size: int) -> tuple[LocalCall, ...]:
    """A chain of calls on square matrices."""
    values = [LocalValue(f"{op}{place}", (size, size), "float32") for place in range(count)]
    reads = [LocalValue("x", (size, size), "float32"), *values]
    both = op.startswith("aten.mm")
    return tuple(
        LocalCall.of(op, (ref(read.name), *((ref(read.name),) if both else ())), (value,))
        for read, value in zip(reads, values, strict=False)
    )


def decided(
    *segments: tuple[LocalCall | LocalUpdate, ...], mode: GraphMode = "auto"
) -> tuple[frozenset[int], GraphedRun]:
    """The ids of the segments that are marked as replayed, and why."""
    taken = LocalInput(LocalValue("x", segments[0][0].makes[0].shape, "float32"), "parameter", "x")
    actors = tuple(Compute(place, nodes, (), ()) for place, nodes in enumerate(segments))
    program = LocalProgram(0, (taken,), tuple(node for each in segments for node in each), ())
    plan = RankPlan(0, (taken,), actors, ())
    marked, found = with_cuda_graphs(plan, program, default_device("cuda"), mode, capture_obstacle)
    return marked.replayed, found


def test_short_kernels_are_replayed_and_long_ones_launched() -> None:
    short, long = calls("aten.relu.default", 20, 8), calls("aten.mm.default", 20, 8192)
    replayed, found = decided(short)
    assert replayed == {0}
    assert (found.launches, found.saved) == (20, 19)
    assert found.host > found.device > 0
    replayed, found = decided(long)
    assert not replayed
    assert found.reasons == {0: "the device takes longer than the host"}
    assert decided(long, mode="always")[0] == {0}
    assert decided(short, mode="never")[1].reasons == {0: "switched off"}


def test_views_and_updates_are_no_launches() -> None:
    views = calls("aten.t.default", 20, 8)
    update = LocalUpdate("SGD", "x", "aten.relu.default0", (), 0, "x")
    relus = calls("aten.relu.default", FEWEST_LAUNCHES, 8)
    some, fewer = (*relus, *views, update), (*relus[:-1], *views, update)
    assert segment_launches(Compute(0, some, (), ())) == FEWEST_LAUNCHES
    assert decided(some)[0] == {0}
    assert decided(fewer)[1].reasons == {0: "few launches"}


def test_micro_batches_count_each_time() -> None:
    nodes = calls("aten.relu.default", FEWEST_LAUNCHES, 8)
    taken = LocalInput(LocalValue("x", (8, 8), "float32"), "parameter", "x")
    actor = replace(Compute(0, nodes, (), ()), acts=3)
    plan = RankPlan(0, (taken,), (actor,), (), micro_batches=3)
    _, found = with_cuda_graphs(
        plan, LocalProgram(0, (taken,), nodes, ()), default_device("cuda"), "auto", capture_obstacle
    )
    assert (found.launches, found.saved) == (3 * FEWEST_LAUNCHES, 3 * (FEWEST_LAUNCHES - 1))


@pytest.mark.parametrize(
    ("op", "why"),
    [
        ("weft.offload", "copies to host memory"),
        ("weft.checked", "reads its error codes"),
        ("weft.required", "reads whether the check holds"),
        ("weft.ctc_loss", "reads how long targets are"),
        ("aten.nonzero.default", "its shape depends on values"),
        ("aten._local_scalar_dense.default", "values that the host reads"),
        ("mine.op.default", "an op of the user's"),
    ],
)
def test_what_cannot_be_captured_is_told(op: str, why: str) -> None:
    assert why in str(capture_obstacle(op))
    nodes = (*calls("aten.relu.default", 20, 8), *calls(op, 1, 8))
    assert why in decided(nodes, mode="always")[1].reasons[0]


@pytest.mark.parametrize(
    "op", ["aten.mm.default", "weft.uniform", "aten._scaled_dot_product_flash_attention.default"]
)
def test_what_can_be_captured(op: str) -> None:
    assert capture_obstacle(op) is None
