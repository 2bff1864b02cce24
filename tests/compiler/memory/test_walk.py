"""Peak memory of plans written by hand: lifetimes, versions, views, collectives."""

from __future__ import annotations

import pytest

from build import ref
from weft.boxing import overlaps
from weft.compiler.memory.act import exchange_bytes
from weft.compiler.memory.order import Moment
from weft.compiler.memory.walk import levels, memory
from weft.compiler.schedule.credits import reuse_buffers
from weft.ir.alias import Memory, overwritable
from weft.ir.nodes import UpdateBytes
from weft.ir.plan import (
    Collective,
    Communicate,
    Compute,
    Feed,
    Fetch,
    Hold,
    LocalCall,
    LocalInput,
    LocalUpdate,
    LocalValue,
    RankPlan,
    Register,
    RegisterKind,
    Transfer,
)
from weft.ops.kernel_memory import FEW

KB = 256  # float32 elements in a KiB


def value(name: str, kib: int = 1) -> LocalValue:
    return LocalValue(name, (kib, KB), "float32")


def call(op: str, reads: list[str], makes: LocalValue) -> LocalCall:
    return LocalCall.of(op, tuple(ref(name) for name in reads), (makes,))


def register(
    name: str,
    producer: int,
    *consumers: int,
    kib: int = 1,
    kind: RegisterKind = "activation",
    full: bool = False,
    credits: int = 1,
    rate: int = 1,
) -> Register:
    return Register(value(name, kib), kind, producer, consumers, credits, full, rate)


X = LocalInput(value("x"), "batch", "x")
W = LocalInput(value("w"), "parameter", "w")
HOLD, FEED = Hold(0, ("w",)), Feed(1, ("x",), ("x",))
BASE = (
    register("w", 0, 2, kind="parameter", full=True),
    register("x", 1, 2, kind="batch", credits=2),
)


def plan(actors: tuple[Compute | Communicate | Fetch, ...], *registers: Register) -> RankPlan:
    return RankPlan(0, (W, X), (HOLD, FEED, *actors), (*BASE, *registers))


def kib(memory: Memory) -> dict[str, float]:
    kinds = ("gradients", "activations", "communication", "peak")
    return {kind: getattr(memory, kind) / 1024 for kind in kinds if getattr(memory, kind)}


def test_temporaries_go_after_their_last_use() -> None:
    nodes = (
        call("aten.mm.default", ["x", "w"], value("a", 8)),
        call("aten.neg.default", ["a"], value("b", 2)),
        call("aten.exp.default", ["b"], value("c", 4)),
    )
    found = memory(plan((Compute(2, nodes, ("x", "w"), ("c",)),), register("c", 2, 3, kib=4)))
    assert kib(found.memory) == {"activations": 10, "peak": 12}  # a and b, w and x
    assert found.actor == 2


@pytest.mark.parametrize(("kib_of", "rows"), [(8, 8), (2048, 512)])
def test_rows_that_a_loss_works_on_take_memory(kib_of: int, rows: float) -> None:
    """A few rows of its result at a time: all of a small one, 512 KiB of a large one."""
    made = value("c", kib_of)
    nodes = (call("weft.cross_entropy_backward", ["x", "w"], made),)
    compute = Compute(2, nodes, ("x", "w"), ("c",))
    found = memory(plan((compute,), register("c", 2, 3, kib=kib_of)))
    assert kib(found.memory) == {"activations": kib_of + rows, "peak": kib_of + rows + 2}


def test_views_share_memory_and_keep_it() -> None:
    first = (
        call("aten.mm.default", ["x", "w"], value("a", 8)),
        call("aten.t.default", ["a"], value("v", 8)),
    )
    second = (call("aten.exp.default", ["v"], value("c", 8)),)
    actors = (
        Compute(2, first, ("x", "w"), ("v",)),
        Compute(3, second, ("v",), ("c",)),
        Fetch(4, ("c",), ("c",)),
    )
    found = memory(plan(actors, register("v", 2, 3, kib=8), register("c", 3, 4, kib=8)))
    assert kib(found.memory) == {"activations": 16, "peak": 18}
    held = [(each.register, each.versions, each.bytes) for each in found.held]
    assert held == [("a", 1, 8192), ("c", 1, 8192)]


def test_slices_in_pieces_are_copies() -> None:
    """A slice of rows keeps what it is cut from; one of columns is memory of its own."""

    def held(dim: int, offset: int) -> float:
        shape = (2, KB) if dim == 0 else (8, KB // 4)
        part = LocalValue("v", shape, "float32")
        cut = LocalCall.of("weft.slice", (ref("a"), dim, offset, shape[dim]), (part,))
        first = (call("aten.mm.default", ["x", "w"], value("a", 8)), cut)
        second = (call("aten.mm.default", ["v", "w"], value("c", 8)),)
        actors = (
            Compute(2, first, ("x", "w"), ("v",)),
            Compute(3, second, ("v",), ("c",)),
            Fetch(4, ("c",), ("c",)),
        )
        made = Register(part, "activation", 2, (3,), 1)
        return kib(memory(plan(actors, made, register("c", 3, 4, kib=8))).memory)["activations"]

    assert held(0, 0) == 16  # a, and c
    assert held(1, 64) == 10  # the part, and a or c


def test_what_lies_on_the_host_gives_nothing_back() -> None:
    first = (
        call("aten.mm.default", ["x", "w"], value("a", 8)),
        call("weft.offload", ["a"], value("h", 8)),
    )
    second = (
        call("weft.load", ["h"], value("b", 8)),
        call("aten.exp.default", ["b"], value("c", 8)),
        call("aten.exp.default", ["c"], value("d", 8)),
        call("aten.mul.Tensor", ["c", "d"], value("e", 8)),
    )
    actors = (
        Compute(2, first, ("x", "w"), ("h",)),
        Compute(3, second, ("h",), ("e",)),
        Compute(4, (call("aten.zeros.default", [], value("f", 14)),), (), ()),
        Fetch(5, ("e",), ("e",)),
    )
    found = memory(
        plan(actors, register("h", 2, 3, kib=8, kind="host"), register("e", 3, 5, kib=8))
    )
    assert kib(found.memory) == {"activations": 24, "peak": 26}  # c, d and e


@pytest.mark.parametrize(("op", "more"), [("aten.neg.default", 0), ("aten.t.default", 8)])
def test_what_lies_out_of_order_is_copied_to_be_sent(op: str, more: float) -> None:
    nodes = (call("aten.mm.default", ["x", "w"], value("a", 8)), call(op, ["a"], value("b", 8)))
    gather = Collective("all_gather", 0, value("b", 8), value("c", 16), dim=0, sizes=(8, 8))
    actors = (
        Compute(2, nodes, ("x", "w"), ("b",)),
        Communicate(3, (gather,), "comm:0"),
        Fetch(4, ("c",), ("c",)),
    )
    found = memory(plan(actors, register("b", 2, 3, kib=8), register("c", 3, 4, kib=16)))
    assert found.memory.peak / 1024 == 2 + 8 + 16 + more


@pytest.mark.parametrize(
    ("takes", "more"),
    [((0, 0, 0), 0), ((8, 0, 0), 2), ((8, 4, 0), 3), ((0, 0, 4), 2), ((8, 4, 4), 5)],
)
def test_updates_take_memory(takes: tuple[int, int, int], more: float) -> None:
    """Two of 1 KiB in a loop: what one takes, what the last one left, and what both take together."""
    nodes = tuple(call("aten.mm.default", ["x", "w"], value(name)) for name in "ab")
    updates = tuple(
        LocalUpdate("RMSprop", "w", name, (), 0, "w", takes=UpdateBytes(*takes)) for name in "ab"
    )
    found = memory(plan((Compute(2, (*nodes, *updates), ("x", "w"), ()),)))
    few = FEW / 1024 if takes[0] else 0
    assert found.memory.peak / 1024 == 2 + 2 + more + few


def test_what_a_segment_is_the_last_to_read_goes_on_the_way() -> None:
    first = (call("aten.mm.default", ["x", "w"], value("a", 8)),)
    second = (
        call("aten.exp.default", ["a"], value("b", 1)),
        call("aten.exp.default", ["b"], value("c", 8)),
    )
    actors = (Compute(2, first, ("x", "w"), ("a",)), Compute(3, second, ("a",), ("c",)))
    registers = register("a", 2, 3, kib=8), register("c", 3, 4, kib=8)
    alone = memory(plan((*actors, Fetch(4, ("c",), ("c",))), *registers))
    assert kib(alone.memory) == {"activations": 9, "peak": 11}  # a and b, then b and c
    kept = (register("a", 2, 3, 4, kib=8), registers[1])
    fetched = memory(plan((*actors, Fetch(4, ("c", "a"), ("c", "a"))), *kept))
    assert kib(fetched.memory) == {"activations": 17, "peak": 19}


def loop() -> RankPlan:
    """A forward of two micro-batches, a backward that adds up over them, and an update."""
    forward = (call("aten.mm.default", ["x", "w"], value("a", 8)),)
    backward = (
        call("aten.exp.default", ["a"], value("g", 4)),
        LocalCall.of("weft.accumulate", (ref("g"), "sum"), (value("s", 4),)),
    )
    update = (LocalUpdate("SGD", "w", "s", (), 0, "w"),)
    actors = (
        Compute(2, forward, ("x", "w"), ("a",), acts=2),
        Compute(3, backward, ("a",), ("s",), acts=2),
        Compute(4, update, ("s",), ()),
    )
    registers = (
        register("a", 2, 3, kib=8, credits=2, rate=2),
        register("s", 3, 4, kib=4, kind="gradient"),
    )
    return RankPlan(0, (W, X), (HOLD, FEED, *actors), (*BASE, *registers), 2)


def of_loop(order: list[Moment] | None = None) -> dict[str, float]:
    return kib(memory(loop(), order).memory)


def moments(*acts: tuple[int, int]) -> list[Moment]:
    return [Moment(begins, *act) for act in acts for begins in (True, False)]


def test_micro_batches_in_turn_hold_one_version() -> None:
    assert of_loop() == {"gradients": 4, "activations": 12, "peak": 18}
    assert of_loop() == of_loop(moments((1, 0), (2, 0), (3, 0), (2, 1), (3, 1), (4, 0)))


def test_acts_of_a_micro_batch_and_of_a_step_have_peaks_of_their_own() -> None:
    """An update holds what was added up, a parameter and the batch; a backward an activation and its part besides."""
    peak = memory(loop())
    assert (peak.of_micro_batch, peak.of_step) == (18 * 1024, 6 * 1024)
    assert peak.memory.peak == peak.of_micro_batch


def test_all_forwards_first_hold_all_versions() -> None:
    gpipe = moments((1, 0), (2, 0), (2, 1), (3, 0), (3, 1), (4, 0))
    assert of_loop(gpipe) == {"gradients": 4, "activations": 20, "peak": 26}


def all_reduce(*names: str) -> Communicate:
    each = (Collective("all_reduce", 0, value(name), value(f"{name}!")) for name in names)
    return Communicate(3, tuple(each), "comm:0")


def bucket_plan(kept: bool = False) -> RankPlan:
    """Two gradients that are reduced together; when `kept`, the second is returned, too, as it was before."""
    nodes = tuple(call("aten.mm.default", ["x", "w"], value(name)) for name in "ab")
    update = (LocalUpdate("SGD", "w", "a!", (), 0, "w"),)
    keys = ("b!", "b") if kept else ("b!",)
    actors = (
        Compute(2, nodes, ("x", "w"), ("a", "b")),
        all_reduce("a", "b"),
        Compute(4, update, ("a!",), ()),
        Fetch(5, keys, keys),
    )
    readers = (3, 5) if kept else (3,)
    made = (register("a", 2, 3), register("b", 2, *readers), register("a!", 3, 4))
    return reuse_buffers(plan(actors, *made, register("b!", 3, 5)))


def test_a_bucket_is_reduced_where_it_lies() -> None:
    found = memory(bucket_plan()).memory
    assert kib(found) == {"gradients": 1, "activations": 1, "peak": 4}
    order = moments((1, 0), (2, 0), (3, 0), (5, 0), (4, 0))
    assert kib(memory(bucket_plan(), order).memory) == kib(found)
    steps = list(levels(bucket_plan(), order))
    assert len(steps) == len(order)
    assert max(steps) == found.peak


def test_what_somebody_else_reads_is_copied() -> None:
    assert overwritable(bucket_plan()) == {"a", "b"}
    assert overwritable(bucket_plan(kept=True)) == {"a"}
    assert kib(memory(bucket_plan(kept=True)).memory) == {
        "gradients": 1,
        "activations": 1,
        "communication": 1,
        "peak": 5,
    }


@pytest.mark.parametrize(
    ("each", "expected"),
    [
        (Collective("all_reduce", 0, value("a", 4), value("b", 4)), 4),
        (Collective("all_gather", 0, value("a", 2), value("b", 4), sizes=(2, 2)), 4),
        (Collective("all_gather", 0, value("a", 2), value("b", 4), dim=1, sizes=(2, 2)), 6),
        (Collective("reduce_scatter", 0, value("a", 4), value("b", 2), sizes=(2, 2)), 2),
        (Collective("reduce_scatter", 0, value("a", 8), value("b", 2), sizes=(2,) * 4), 6),
        (Collective("reduce_scatter", 0, value("a", 4), value("b", 2), dim=1, sizes=(2, 2)), 6),
        (Transfer(0, value("a", 4), None, ((1, ((0, 4), (0, KB))),), ()), 0),
        (Transfer(0, value("a", 4), None, ((1, ((0, 4), (0, KB // 2))),), ()), 2),
        (Transfer(0, None, value("b", 4), (), ((0, ((0, 4), (0, KB))),)), 4),
        (Transfer(0, None, value("b", 4), (), ((0, ((2, 2), (0, KB))),)), 4),
    ],
)
def test_exchanges_take_their_buffers(each: Collective | Transfer, expected: int) -> None:
    assert exchange_bytes(each) == expected * 1024


def test_large_reductions_take_the_buffers_of_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overlaps, "SLICE", 2048)
    large = Collective("reduce_scatter", 0, value("a", 8), value("b", 2), dim=1, sizes=(64,) * 4)
    assert exchange_bytes(large) == (2 + 2 * 2) * 1024  # the result, and a slice twice
