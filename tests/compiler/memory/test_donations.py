"""What an all-reduce writes over: memory that nobody else sees, and that it reads once. What must be a copy."""

from __future__ import annotations

from build import linked, ref
from weft.compiler.schedule.credits import reuse_buffers
from weft.ir.plan import (
    Collective,
    Communicate,
    Compute,
    Hold,
    LocalCall,
    LocalInput,
    LocalUpdate,
    LocalValue,
    RankPlan,
    Register,
)

X = LocalInput(LocalValue("x", (4, 4), "float32"), "parameter", "x")


def value(name: str) -> LocalValue:
    return LocalValue(name, (4, 4), "float32")


def call(op: str, made: str, *names: str) -> LocalCall:
    return LocalCall.of(f"aten.{op}", tuple(map(ref, names)), (value(made),))


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
    plan = reuse_buffers(linked(RankPlan(0, (X,), actors, registers, max(acts))))
    each = plan.actors[2].collectives
    return frozenset(one.input.name for one in each if one.in_place)


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


def test_sources_in_the_memory_of_variables_that_are_rewritten_are_copied() -> None:
    """`x` and `y` swap their values: each is read while the other is written."""
    y = LocalInput(LocalValue("y", (4, 4), "float32"), "parameter", "y")
    nodes = (call("t.default", "a", "x"), call("neg.default", "b", "x"))
    updates = tuple(
        LocalUpdate("copy", target, source, (), 0, target)
        for target, source in (("x", "y"), ("y", "a"), ("x", "b"))
    )
    segment = Compute(0, (*nodes, *updates), (), ("x", "y"))
    registers = tuple(Register(item.value, "parameter", 0, (), full=True) for item in (X, y))
    plan = reuse_buffers(RankPlan(0, (X, y), (segment,), registers))
    assert plan.actors[0].copies == ("a", "y")
