"""Give every tensor that passes between actors a register, and every register its credits.

Before: the actors of one rank. After: its `RankPlan`, legal and proven live.
"""

from __future__ import annotations

from weft.compiler.liveness import prove_live
from weft.ir.plan import (
    Actor,
    Communicate,
    Feed,
    LocalProgram,
    LocalValue,
    RankPlan,
    Register,
    RegisterKind,
)
from weft.ir.verify_plan import verify_plan

# Two versions of a batch may exist: one that is read, one that the host fills meanwhile.
BATCH_CREDITS = 2


def credit(program: LocalProgram, actors: tuple[Actor, ...]) -> RankPlan:
    """The plan of one rank, with as few credits as one step at a time needs."""
    kinds: dict[str, RegisterKind] = {item.value.name: item.role for item in program.inputs}
    for actor in actors:
        if isinstance(actor, Communicate):
            kinds.update((name, "communication") for name in actor.produces)
    readers: dict[str, list[int]] = {}
    for actor in actors:
        for name in actor.consumes:
            readers.setdefault(name, []).append(actor.id)
    registers = tuple(
        _register(program.values[name], kinds.get(name, "activation"), actor, readers.get(name, []))
        for actor in actors
        for name in actor.produces
    )
    plan = RankPlan(program.rank, program.inputs, actors, registers)
    prove_live(plan)
    return verify_plan(plan)


def _register(
    value: LocalValue, kind: RegisterKind, producer: Actor, consumers: list[int]
) -> Register:
    credits = BATCH_CREDITS if isinstance(producer, Feed) else 1
    full = kind in ("parameter", "buffer", "state", "constant")
    return Register(value, kind, producer.id, tuple(consumers), credits, full)
