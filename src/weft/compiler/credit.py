"""Give every tensor that passes between actors a register, and every register its credits.

Before: the actors of one rank. After: its `RankPlan`, proven live: every cycle of the marked graph holds a credit.
"""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from weft.errors import InternalError
from weft.ir.plan import (
    Actor,
    Collective,
    Communicate,
    Compute,
    Feed,
    LocalCall,
    LocalProgram,
    LocalValue,
    RankPlan,
    Register,
    RegisterKind,
)

# Two versions of a batch may exist: one that is read, one that the host fills meanwhile.
BATCH_CREDITS = 2


def credit(program: LocalProgram, actors: tuple[Actor, ...]) -> RankPlan:
    """The plan of one rank, with as few credits as one step at a time needs."""
    values = _values(program, actors)
    kinds: dict[str, RegisterKind] = {item.value.name: item.role for item in program.inputs}
    for actor in actors:
        if isinstance(actor, Communicate):
            kinds.update((name, "communication") for name in actor.produces)
    readers: dict[str, list[int]] = {}
    for actor in actors:
        for name in actor.consumes:
            readers.setdefault(name, []).append(actor.id)
    registers = tuple(
        _register(values[name], kinds.get(name, "activation"), actor, readers.get(name, []))
        for actor in actors
        for name in actor.produces
    )
    plan = RankPlan(program.rank, program.inputs, actors, registers)
    prove_live(plan)
    return plan


def _values(program: LocalProgram, actors: tuple[Actor, ...]) -> dict[str, LocalValue]:
    found = {item.value.name: item.value for item in program.inputs}
    for actor in actors:
        nodes = actor.nodes if isinstance(actor, Compute) else ()
        if isinstance(actor, Communicate):
            nodes = actor.collectives  # type: ignore[assignment]
        for node in nodes:
            if isinstance(node, LocalCall):
                found.update((value.name, value) for value in node.outputs if value)
            elif isinstance(node, Collective):
                found[node.output.name] = node.output
    return found


def _register(
    value: LocalValue, kind: RegisterKind, producer: Actor, consumers: list[int]
) -> Register:
    credits = BATCH_CREDITS if isinstance(producer, Feed) else 1
    full = kind in ("parameter", "buffer", "state", "constant")
    return Register(value, kind, producer.id, tuple(consumers), credits, full)


def prove_live(plan: RankPlan) -> None:
    """Raise InternalError, with the cycle, unless every cycle of the plan's marked graph holds a credit.

    A register is two edges: from producer to consumer (marked when it is full at the start) and back (marked with
    its free copies). A marked graph is live iff no cycle runs over unmarked edges only (Commoner et al., 1971).
    """
    after: dict[int, dict[int, str]] = {actor.id: {} for actor in plan.actors}
    for register in plan.registers:
        for consumer in register.consumers:
            if not register.full:
                after[consumer][register.producer] = register.value.name
            if register.credits - register.full == 0:
                after[register.producer][consumer] = register.value.name
    for queue in {actor.queue for actor in plan.actors if isinstance(actor, Communicate)}:
        order = [actor.id for actor in plan.actors if actor.queue == queue]
        for first, second in pairwise(order):
            after[second].setdefault(first, f"order of {queue}")
    try:
        TopologicalSorter(after).prepare()
    except CycleError as error:
        steps = pairwise(error.args[1])
        path = ", ".join(f"{b} waits for {a} over {after[b][a]}" for a, b in steps)
        raise InternalError(f"rank {plan.rank} would wait for itself: actor {path}") from None
