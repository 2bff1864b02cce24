"""Give every tensor that passes between actors a register, and every register its credits.

Before: the actors of one rank. After: its `RankPlan`, legal. Registers of a loop get more copies by `copies.py`.
"""

from __future__ import annotations

from dataclasses import replace

from weft.ir.alias import copied_results, overwritable
from weft.ir.legal.plans import verify_plan
from weft.ir.plan import (
    Actor,
    Collective,
    Communicate,
    Compute,
    Exchange,
    Feed,
    LocalCall,
    LocalProgram,
    LocalUpdate,
    LocalValue,
    RankPlan,
    Register,
    RegisterKind,
)

# Two versions of a batch may exist: one that is read, one that the host fills meanwhile.
BATCH_CREDITS = 2


def credit(
    program: LocalProgram, actors: tuple[Actor, ...], controls: tuple[Register, ...] = ()
) -> RankPlan:
    """The plan of one rank, with as few credits as one step at a time needs.

    With micro-batches or several stages, `schedule/schedule.py` gives more and proves the plan live together
    with those of the other ranks.

    Args:
        program: of the rank.
        actors: its actors.
        controls: registers that only make actors wait (`schedule/gathers/`).
    """
    kinds: dict[str, RegisterKind] = {item.value.name: item.role for item in program.inputs}
    for actor in actors:
        if isinstance(actor, Communicate):
            kinds.update((name, "communication") for name in actor.produces)
        elif isinstance(actor, Compute):
            calls = (node for node in actor.nodes if isinstance(node, LocalCall))
            away = (call for call in calls if call.op == "weft.offload")
            kinds.update((value.name, "host") for call in away for value in call.makes)
    readers: dict[str, list[int]] = {}
    for actor in actors:
        for name in actor.consumes:
            readers.setdefault(name, []).append(actor.id)
    extra = {register.value.name for register in controls}
    written = (
        name
        for actor in actors
        if isinstance(actor, Compute) and actor.acts > 1
        for node in actor.nodes
        if isinstance(node, LocalUpdate)
        for name in (node.target, *node.states)
    )
    rates = dict.fromkeys((*program.loop, *written), program.micro_batches)
    registers = tuple(
        _register(
            program.values[name],
            kinds.get(name, "activation"),
            actor,
            readers.get(name, []),
            rates.get(name, 1),
        )
        for actor in actors
        for name in actor.produces
        if name not in extra
    )
    plan = RankPlan(
        program.rank, program.inputs, actors, (*registers, *controls), program.micro_batches
    )
    return verify_plan(donate(plan))


def _register(
    value: LocalValue, kind: RegisterKind, producer: Actor, consumers: list[int], rate: int
) -> Register:
    credits = BATCH_CREDITS if isinstance(producer, Feed) else 1
    full = kind in ("parameter", "buffer", "state", "constant")
    return Register(value, kind, producer.id, tuple(consumers), credits, full, rate)


# Writes over memory, stated in the plan: all-reduces over their input, and the values that must be copied before.
#
# Before: a plan with its registers. After: an all-reduce runs in place where nobody else holds the
# memory of its input, so gradients are reduced where they lie, with no bucket to fill and to empty;
# and what a segment hands on out of the memory of a variable is a copy where the variable is
# rewritten.


def donate(plan: RankPlan) -> RankPlan:
    """The plan with `in_place` of its all-reduces and `copies` of its segments."""
    over = overwritable(plan)
    actors = tuple([_donated(plan, actor, over) for actor in plan.actors])
    return replace(plan, actors=actors)


def _donated(plan: RankPlan, actor: Actor, over: frozenset[str]) -> Actor:
    match actor:
        case Compute():
            copies = copied_results(plan, actor)
            return replace(actor, copies=copies) if copies else actor
        case Communicate() if not over.isdisjoint(actor.consumes):
            each = tuple([_in_place(one, over) for one in actor.collectives])
            return replace(actor, collectives=each)
    return actor


def _in_place(each: Exchange, over: frozenset[str]) -> Exchange:
    if isinstance(each, Collective) and each.kind == "all_reduce" and each.input.name in over:
        return replace(each, in_place=True)
    return each
