"""Segments keep to a part of the step: the loop or once a step, and one phase of one stage."""

from __future__ import annotations

from dataclasses import replace

from build import value
from drafts import drafted, planned
from local_programs import all_reduce, call, program, update
from weft.compiler.schedule.bucket import bucket
from weft.compiler.schedule.schedule import split_backward
from weft.ir.nodes import Phase, PhaseKind
from weft.ir.plan import (
    Actor,
    Compute,
    LocalNode,
    LocalProgram,
    Transfer,
)


def at(node: LocalNode, stage: int, kind: PhaseKind) -> LocalNode:
    return replace(node, phase=Phase(stage, kind))


def send(source: str, communicator: int) -> Transfer:
    return Transfer(communicator, value(source), None, ((1, ((0, 4),)),), ())


def receive(output: str, communicator: int) -> Transfer:
    return Transfer(communicator, None, value(output), (), ((1, ((0, 4),)),))


def looped(nodes: list[LocalNode], *once: str) -> LocalProgram:
    """A program of four micro-batches in which all but `once` is made for each."""
    made = {item.name for node in nodes for item in node.makes} - set(once)
    return replace(program(nodes, outputs=()), micro_batches=4, loop=frozenset(made))


def stage_0() -> LocalProgram:
    """Stage 0 of two: a cast once a step, forward, backward with two weights' gradients, updates."""
    nodes = [
        at(call("cast", "v"), 0, "forward"),
        at(call("h", "x", "cast"), 0, "forward"),
        at(call("y", "h", "w"), 0, "forward"),
        at(send("y", 0), 1, "forward"),
        at(receive("gy", 1), 0, "backward"),
        at(call("gw", "gy", "h"), 0, "backward"),
        at(call("gw.sum", "gw", op="weft.accumulate"), 0, "backward"),
        at(call("gh", "gy", "w"), 0, "backward"),
        at(call("gv", "gh", "x"), 0, "backward"),
        at(call("gv.sum", "gv", op="weft.accumulate"), 0, "backward"),
        at(update("v", "gv.sum"), 0, "backward"),
        at(update("w", "gw.sum"), 0, "backward"),
    ]
    return looped(nodes, "cast", "gw.sum", "gv.sum")


def segments(local: LocalProgram, staged: bool = True) -> list[Compute]:
    actors = drafted(local, staged=staged).actors
    return [actor for actor in actors if isinstance(actor, Compute)]


def names(actor: Actor) -> list[str]:
    assert isinstance(actor, Compute)
    return [made.name for node in actor.nodes for made in node.makes]


def test_one_forward_and_one_backward_actor() -> None:
    once, forward, backward, updates = segments(stage_0())
    assert (names(once), once.acts) == (["cast"], 1)
    assert (names(forward), forward.acts, forward.phase.kind) == (["h", "y"], 4, "forward")
    assert (len(backward.nodes), backward.acts, backward.phase.kind) == (5, 4, "backward")
    assert (len(updates.nodes), updates.acts) == (2, 1)


def test_rates_of_registers() -> None:
    local = stage_0()
    plan = planned(local, staged=True)
    rates = {register.value.name: register.rate for register in plan.registers}
    assert (rates["h"], rates["y"], rates["gy"]) == (4, 4, 4)
    assert (rates["cast"], rates["gw.sum"], rates["v"], rates["x"]) == (1, 1, 1, 1)


def test_phases_stay_together_in_one_stage() -> None:
    local = looped([call("h", "x", "w"), at(call("g", "h"), 0, "backward")])
    (only,) = segments(local, staged=False)
    assert names(only) == ["h", "g"]


def test_nodes_of_a_part_are_gathered() -> None:
    mixed = [
        at(call("a", "x"), 0, "forward"),
        at(call("b", "a"), 0, "backward"),
        at(call("c", "a"), 0, "forward"),
        at(call("d", "b", "c"), 0, "backward"),
    ]
    assert [names(actor) for actor in segments(looped(mixed))] == [["a", "c"], ["b", "d"]]


def test_a_statistic_is_updated_in_the_forward_that_makes_it() -> None:
    nodes = [
        at(call("h", "x", "v"), 0, "forward"),
        at(call("mean", "h", "w"), 0, "forward"),
        at(call("g", "h"), 0, "backward"),
        at(update("w", "mean"), 0, "backward"),
    ]
    local = looped(nodes)
    forward, backward = segments(local)
    assert (len(forward.nodes), len(backward.nodes)) == (3, 1)
    plan = planned(local, staged=True)
    rates = {register.value.name: (register.rate, register.full) for register in plan.registers}
    assert rates["w"] == (4, True)
    assert rates["v"] == (1, True)


def test_what_comes_once_a_step_does_not_cut_the_loop() -> None:
    nodes = [
        at(receive("tied", 2), 0, "forward"),
        at(call("h", "x", "w"), 0, "forward"),
        at(call("y", "h", "tied"), 0, "forward"),
    ]
    (forward,) = segments(looped(nodes, "tied"))
    assert names(forward) == ["h", "y"]


def test_the_loop_and_the_step_are_not_reduced_together() -> None:
    nodes = [
        call("a", "x"),
        all_reduce("a.sum", "a"),
        call("b", "v"),
        all_reduce("b.sum", "b"),
    ]
    local = looped(nodes, "b", "b.sum")
    schedule = drafted(local, bucket).schedule
    kinds = [len(item.collectives) for item in schedule if hasattr(item, "collectives")]
    assert kinds == [1, 1]


def test_a_reduction_of_a_single_stage_cuts_the_loop() -> None:
    """It starts when the last micro-batch has its gradient, not when all gradients are there."""
    nodes = [
        call("h", "x", "w"),
        call("gw", "h", "w"),
        call("gw.sum", "gw", op="weft.accumulate"),
        call("gv", "h", "v"),
        call("gv.sum", "gv", op="weft.accumulate"),
        all_reduce("gw.all", "gw.sum"),
        all_reduce("gv.all", "gv.sum"),
        update("w", "gw.all"),
        update("v", "gv.all"),
    ]
    local = looped(nodes, "gw.sum", "gv.sum", "gw.all", "gv.all")

    def shape(staged: bool) -> list[tuple[str, int]]:
        actors = drafted(local, bucket_bytes=1, staged=staged).actors[2:-1]
        return [(type(a).__name__, getattr(a, "acts", 0)) for a in actors]

    loop, reduction, once = ("Compute", 4), ("Communicate", 1), ("Compute", 1)
    assert shape(staged=False) == [loop, reduction, loop, reduction, once, once]
    assert shape(staged=True) == [loop, reduction, reduction, once, once]


def middle() -> LocalProgram:
    """The backward of stage 1 of three: it gets gy, and stage 0 waits for gx."""
    nodes = [
        at(receive("gy", 1), 1, "backward"),
        at(call("gw", "gy", "x"), 1, "backward"),
        at(call("gw.sum", "gw", op="weft.accumulate"), 1, "backward"),
        at(call("gh", "gy", "w"), 1, "backward"),
        at(call("gv", "gh", "x"), 1, "backward"),
        at(call("gx", "gh", "v"), 1, "backward"),
        at(send("gx", 2), 0, "backward"),
    ]
    return looped(nodes, "gw.sum")


def test_what_another_stage_waits_for_goes_before_weights() -> None:
    backward, weight = segments(split_backward(middle()))
    assert (names(backward), backward.phase.kind) == (["gh", "gx"], "backward")
    assert (names(weight), weight.phase.kind) == (["gw", "gw.sum", "gv"], "weight")


def test_nobody_waits_for_the_backward_of_the_first_stage() -> None:
    split = split_backward(stage_0())
    kinds = {node.phase.kind for node in split.nodes[5:10]}
    assert kinds == {"weight"}
    assert [node.phase.kind for node in split.nodes[10:]] == ["backward", "backward"]
