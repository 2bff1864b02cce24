"""Rules for time in a plan: acts, rates, values made over a step, control, orders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from weft.ir.nodes import OVER_STEP
from weft.ir.plan import Actor, Communicate, Compute, Hold, LocalCall, LocalNode, RankPlan


def rates_fit(plan: RankPlan) -> Iterator[str]:
    """Acts and rates are 1 or the micro-batches; no register is faster than an actor at it."""
    legal = (1, plan.micro_batches)
    for actor in plan.actors:
        if actor.acts not in legal:
            yield f"actor {actor.id} acts {actor.acts} times in {legal[1]} micro-batches"
    for register in plan.registers:
        name, rate = register.value.name, register.rate
        if rate not in legal:
            yield f"{name} has {rate} versions in {legal[1]} micro-batches"
        for id in (register.producer, *register.consumers):
            if rate > plan.actors[id].acts:
                yield f"actor {id} acts {plan.actors[id].acts} times, {name} has {rate} versions"


def versions_complete(plan: RankPlan) -> Iterator[str]:
    """A value that a step's acts make together is accumulated or packed; they do not read it."""
    once = {r.value.name for r in plan.registers if r.rate == 1 and r.kind != "control"}
    for actor in plan.actors if plan.micro_batches > 1 else ():
        calls = list(_calls(actor))
        over = {name for call in calls if call.op in OVER_STEP for name in _made(call)}
        for name in sorted(over - once):
            yield f"actor {actor.id} makes {name} over a step, but hands it on in each act"
        read = {name for call in calls for name in call.reads} if over else set()
        for name in sorted(over & read):
            yield f"actor {actor.id} reads {name} before the step has made it"
        for name in sorted(once.intersection(actor.produces) - over) if actor.acts > 1 else ():
            yield f"actor {actor.id} makes {name} in each act, but hands it on once a step"


def varying_arguments_complete(plan: RankPlan) -> Iterator[str]:
    """An argument that varies has a value for each act of its actor."""
    for actor in plan.actors:
        for call in _calls(actor):
            for varying in call.varyings:
                if len(varying.values) != actor.acts:
                    yield f"actor {actor.id} acts {actor.acts} times, but {call.op} has {varying}"


def control_registers_empty(plan: RankPlan) -> Iterator[str]:
    """A control register has no tensor; only such a one is waited for or signalled."""
    control = {r.value.name: r for r in plan.registers if r.kind == "control"}
    for name, register in control.items():
        if (register.value.shape, register.value.dtype) != ((0,), "bool"):
            yield f"{name} is a control register, but not bool[0]"
    for actor in plan.actors:
        nodes = _nodes(actor) if control else ()
        touched = {name for node in nodes for name in (*node.reads, *_made(node))}
        for name in sorted(touched & control.keys()):
            yield f"actor {actor.id} uses the control register {name} as a tensor"
        named = (*actor.waits, *actor.signals) if isinstance(actor, Communicate) else ()
        for name in sorted(set(named) - control.keys()):
            yield f"actor {actor.id} waits for or signals {name}, which is no control register"


def orders_complete(plan: RankPlan) -> Iterator[str]:
    """A queue has one order at most: every act once, micro-batches of an actor ascending."""
    queues = [order.queue for order in plan.orders]
    for queue in sorted({queue for queue in queues if queues.count(queue) > 1}):
        yield f"{queue} has two orders"
    for order in plan.orders:
        actors = [a for a in plan.actors if a.queue == order.queue and not isinstance(a, Hold)]
        expected = [(actor.id, micro) for actor in actors for micro in range(actor.acts)]
        # Stable: what stays are the micro-batches of each actor in the order's own order.
        if sorted(order.acts, key=lambda act: act[0]) != expected:
            yield f"the order of {order.queue} is not one of its actors' micro-batches"


def _nodes(actor: Actor) -> Sequence[LocalNode]:
    match actor:
        case Compute(nodes=nodes):
            return nodes
        case Communicate(collectives=collectives):
            return collectives
    return ()


def _calls(actor: Actor) -> Iterator[LocalCall]:
    return (node for node in _nodes(actor) if isinstance(node, LocalCall))


def _made(node: LocalNode) -> set[str]:
    return {value.name for value in node.makes}
