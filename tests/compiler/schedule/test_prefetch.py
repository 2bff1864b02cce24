"""Gathers of ZeRO 3 run ahead of their readers, but no more than a few."""

from __future__ import annotations

from dataclasses import replace

import pytest

from drafts import drafted, planned
from local_programs import all_reduce, call, gather, program
from weft.compiler.schedule.actor_graph import prove_live
from weft.compiler.schedule.bucket import bucket
from weft.compiler.schedule.priorities import AHEAD, gather_rings, order_gathers, prefetch
from weft.compiler.schedule.segment import segment
from weft.ir.plan import (
    Collective,
    Communicate,
    LocalInput,
    LocalNode,
    LocalProgram,
    RankPlan,
)
from weft.ir.plan import LocalValue as Value
from weft.simulator.clock import simulate_step
from weft.strategy.parts import Zero, zero_rules

LAYERS = 5


def layers(micro_batches: int) -> LocalProgram:
    """A chain of layers, each of which gathers its parameter and reads it."""
    nodes: list[LocalNode] = []
    for layer in range(LAYERS):
        nodes += [gather(f"w{layer}", f"p{layer}")]
        nodes += [call(f"h{layer + 1}", f"h{layer}" if layer else "x", f"w{layer}")]
    made = program(nodes, outputs=())
    shards = tuple(
        LocalInput(Value(f"p{layer}", (4,), "float32"), "parameter", f"p{layer}")
        for layer in range(LAYERS)
    )
    loop = frozenset(value.name for node in nodes for value in node.makes)
    if micro_batches == 1:
        return replace(made, inputs=(*made.inputs, *shards))
    return replace(made, inputs=(*made.inputs, *shards), micro_batches=micro_batches, loop=loop)


def plan_of(local: LocalProgram, zero: Zero | None) -> RankPlan:
    return planned(local, prefetch, zero=zero)


def most_ahead(plan: RankPlan) -> int:
    """The most gathers that have begun before their reader ends, when readers take long."""
    seconds = [0.1 if isinstance(actor, Communicate) else 1.0 for actor in plan.actors]
    acts = simulate_step([plan], {0: seconds}).timelines[0]
    begun = [act.start for act in acts if isinstance(plan.actors[act.actor], Communicate)]
    ended = [act.end for act in acts if "w" in str(plan.actors[act.actor].consumes)]
    return max(
        sum(start <= now for start in begun) - sum(end <= now for end in ended) for now in begun
    )


def test_gathers_stay_a_few_ahead() -> None:
    free, told = plan_of(layers(1), Zero(2)), plan_of(layers(1), Zero(3))
    assert most_ahead(free) == LAYERS
    assert most_ahead(told) == AHEAD
    prove_live(told)
    controls = [each for each in told.registers if each.kind == "control"]
    assert len(controls) == LAYERS - AHEAD


def test_the_ring_is_closed_over_micro_batches() -> None:
    free, told = plan_of(layers(3), Zero(2)), plan_of(layers(3), Zero(3))
    assert most_ahead(free) > AHEAD
    assert most_ahead(told) == AHEAD
    controls = [each for each in told.registers if each.kind == "control"]
    assert (len(controls), sum(each.full for each in controls)) == (LAYERS, AHEAD)


def test_a_gather_that_is_read_to_the_end_holds_nobody_up() -> None:
    local = layers(1)
    tied = replace(local, nodes=(*local.nodes, call("end", f"h{LAYERS}", "w0")))
    plan = plan_of(tied, Zero(3))
    prove_live(plan)
    controls = [each for each in plan.registers if each.kind == "control"]
    assert len(controls) == LAYERS - AHEAD - 1


def backward(cast: bool) -> LocalProgram:
    """A chain of layers, each of which gathers its parameter, or a cast of it, and reduces a gradient."""
    nodes: list[LocalNode] = []
    for layer in range(LAYERS):
        shard, whole, hidden = f"p{layer}", f"w{layer}", f"h{layer}" if layer else "x"
        if cast:
            nodes += [call(f"c{layer}", shard)]
            shard = f"c{layer}"
        nodes += [gather(whole, shard), call(f"h{layer + 1}", hidden, whole)]
        nodes += [call(f"g{layer}", f"h{layer + 1}", whole), all_reduce(f"g{layer}!", f"g{layer}")]
    return replace(layers(1), nodes=tuple(nodes))


@pytest.mark.parametrize("cast", [False, True])
def test_a_gather_does_not_wait_for_the_gradients_of_the_layer_before(cast: bool) -> None:
    local = backward(cast)
    early = planned(local, prefetch, order_gathers, bucket_bytes=1, zero=Zero(3))
    prove_live(early)

    def order(plan: RankPlan) -> list[str]:
        return [name for a in plan.actors if isinstance(a, Communicate) for name in a.produces]

    late = [f"{kind}{layer}{mark}" for layer in range(LAYERS) for kind, mark in ("w ", "g!")]
    late = [name.replace(" ", "") for name in late]
    assert order(planned(local, prefetch, bucket_bytes=1, zero=Zero(3))) == late
    # A cast is made in its place: its gather comes no earlier.
    first = late if cast else ["w0", "w1", "w2", "g0!", "w3", "g1!", "w4", "g2!", "g3!", "g4!"]
    assert order(early) == first


def test_a_gather_comes_after_what_lets_it_begin_wherever_it_stood() -> None:
    """The last gather stands first in the graph, and the first layer waits for another exchange."""
    local = layers(1)
    last = gather("w4", "p4")
    first, *rest = (node for node in local.nodes if node != last)
    reduced = [call("n", "x"), all_reduce("n!", "n"), call("h1", "n!", "w0")]
    made = replace(local, nodes=(first, last, *reduced, *rest[1:]))
    plan = planned(made, prefetch, order_gathers, bucket_bytes=1, zero=Zero(3))
    prove_live(plan)
    order = [name for a in plan.actors if isinstance(a, Communicate) for name in a.produces]
    assert order[-1] == "w4"


def test_only_what_is_gathered_for_each_use_is_in_the_ring() -> None:
    rules = (("p[024]", Zero(3)), ("*", Zero(1)))
    local = layers(1)
    actors = drafted(local).actors
    (ring,) = gather_rings(local, actors, rules)
    gathered = [actors[each.id] for each in ring]
    names = [c.input.name for a in gathered if isinstance(a, Communicate) for c in a.collectives]  # type: ignore[union-attr]
    assert names == ["p0", "p2", "p4"]
    passes = bucket, segment, prefetch
    assert len(drafted(local, *passes, zero=rules).controls) == 3 - AHEAD
    assert not drafted(local, *passes, zero=(("*", Zero(2)),)).controls


def test_a_bucket_with_something_that_stays_is_released_by_the_readers_of_the_rest() -> None:
    """A bias that is whole for the step travels with the weight, whose readers let the next gather begin."""
    nodes = [gather("w0", "p0"), gather("w1", "p1"), call("h1", "x", "w0", "w1")]
    reduced = all_reduce("h1!", "h1")
    local = replace(layers(1), nodes=(*nodes, reduced, call("end", "h1!", "w1")))
    actors = drafted(local).actors
    some, every = (("p0", Zero(3)), ("*", Zero(1))), (("*", Zero(3)),)
    for rules, made in ((some, "h1"), (every, "end")):
        ((found,),) = gather_rings(local, actors, rules)
        assert made in (node.makes[0].name for node in actors[found.last].nodes)  # type: ignore[union-attr]


def test_gathers_of_each_dtype_have_a_ring_of_their_own() -> None:
    """A block in bfloat16 gathers its norms in float32: one ring for both would gather no block ahead."""
    local = layers(1)
    half = {f"p{layer}" for layer in range(0, LAYERS, 2)}
    inputs = tuple(
        replace(each, value=replace(each.value, dtype="bfloat16")) if each.key in half else each
        for each in local.inputs
    )
    nodes = tuple(
        replace(
            node,
            input=replace(node.input, dtype="bfloat16"),
            output=replace(node.output, dtype="bfloat16"),
        )
        if isinstance(node, Collective) and node.input.name in half
        else node
        for node in local.nodes
    )
    mixed = replace(local, inputs=inputs, nodes=nodes)
    rings = list(gather_rings(mixed, drafted(mixed).actors, zero_rules(Zero(3))))
    assert [len(ring) for ring in rings] == [3, 2]
    assert most_ahead(plan_of(mixed, Zero(3))) == 2 * AHEAD
