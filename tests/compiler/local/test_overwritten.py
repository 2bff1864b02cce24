"""What an all-reduce may write over: memory that nobody else sees, and that it reads once."""

from __future__ import annotations

import build
from build import refs, value
from weft.compiler.local.overwritten import overwritten
from weft.ir.plan import (
    Collective,
    Communicate,
    Compute,
    Hold,
    LocalCall,
    LocalInput,
    LocalValue,
    RankPlan,
    Register,
)

X = LocalInput(LocalValue("x", (4, 4), "float32"), "parameter", "x")


def call(op: str, made: str, *names: str) -> LocalCall:
    return build.call(f"aten.{op}", refs(*names), made)


def overwrites(
    nodes: tuple[LocalCall, ...],
    leaving: tuple[str, ...],
    reduced: tuple[str, ...] = ("a",),
    acts: tuple[int, int] = (1, 1),
) -> frozenset[str]:
    """Of a segment, and of a bucket of all-reduces behind it; they act so often in a step."""
    each = tuple(
        Collective("all_reduce", 0, value(name), value(f"{name}{place}"))
        for place, name in enumerate(reduced)
    )
    actors = (
        Hold(0, ("x",)),
        Compute(1, nodes, ("x",), leaving, acts=acts[0]),
        Communicate(2, each, "comm:0", acts=acts[1]),
    )
    registers = (
        Register(X.value, "parameter", 0, (1,), full=True),
        *(Register(value(name), "gradient", 1, (2,), rate=acts[0]) for name in leaving),
    )
    return overwritten(RankPlan(0, (X,), actors, registers, max(acts)))


def test_what_a_segment_has_made_for_it_alone() -> None:
    assert overwrites((call("mm.default", "a", "x", "x"),), ("a",)) == {"a"}


def test_views_of_variables_are_not() -> None:
    assert not overwrites((call("t.default", "a", "x"),), ("a",))


def test_memory_that_leaves_under_two_names_is_not() -> None:
    nodes = (call("mm.default", "a", "x", "x"), call("t.default", "b", "a"))
    assert overwrites(nodes, ("a",)) == {"a"}
    assert not overwrites(nodes, ("a", "b"), ("a", "b"))


def test_what_is_reduced_twice_is_not() -> None:
    assert not overwrites((call("mm.default", "a", "x", "x"),), ("a",), ("a", "a"))


def test_a_version_that_each_micro_batch_reads_is_not() -> None:
    nodes = (call("mm.default", "a", "x", "x"),)
    assert overwrites(nodes, ("a",), acts=(2, 2)) == {"a"}
    assert not overwrites(nodes, ("a",), acts=(1, 2))
