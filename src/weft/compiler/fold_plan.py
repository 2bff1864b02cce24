"""From the plan of one rank to that of another that is like it: the same copies, the same orders.

Before: a rank's own plan, without copies and orders. After: with those that were found for the rank
that stands for it, which have been rehearsed and proven live for both (`fold.py`).
"""

from __future__ import annotations

from dataclasses import replace

from weft.errors import InternalError
from weft.ir.plan import Actor, Order, RankPlan, Register
from weft.ir.verify_plan import verify_plan


def like(plan: RankPlan, first: RankPlan) -> RankPlan:
    """`plan` with the copies and orders of `first`.

    Raises:
        InternalError: when the two ranks are not alike; names what differs.
    """
    queues: dict[str, str] = {}
    for own, other in zip(plan.actors, first.actors, strict=False):
        if _shown(own) != _shown(other) or queues.setdefault(other.queue, own.queue) != own.queue:
            raise _unlike(plan, first, f"actor {own.id}")
    if len(plan.actors) != len(first.actors) or len(set(queues.values())) != len(queues):
        raise _unlike(plan, first, "the number of actors, or of their queues")
    if list(map(_bare, plan.registers)) != list(map(_bare, first.registers)):
        raise _unlike(plan, first, "the registers")
    registers = tuple(
        replace(own, credits=other.credits)
        for own, other in zip(plan.registers, first.registers, strict=True)
    )
    orders = tuple(Order(queues[order.queue], order.acts) for order in first.orders)
    return verify_plan(replace(plan, registers=registers, orders=orders))


def _shown(actor: Actor) -> tuple[object, ...]:
    """What a rehearsal sees of an actor, but for its queue."""
    return type(actor), actor.id, actor.acts, actor.priority, actor.consumes, actor.produces


def _bare(register: Register) -> Register:
    return replace(register, credits=1)


def _unlike(plan: RankPlan, first: RankPlan, what: str) -> InternalError:
    return InternalError(
        f"ranks {first.rank} and {plan.rank} were planned as equal, but differ in {what}"
    )
