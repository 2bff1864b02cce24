"""A plan with the copies and orders that were found for a rank that is alike.

They have been simulated and proven live for both.
"""

from __future__ import annotations

from dataclasses import replace

from weft.errors import InternalError
from weft.ir.legal.plans import verify_plan
from weft.ir.plan import Actor, Order, RankPlan, Register


def like(plan: RankPlan, first: RankPlan) -> RankPlan:
    """`plan` with the copies and orders of `first`.

    Raises:
        InternalError: when the two ranks are not alike; names what differs.
    """
    queues: dict[str, str] = {}
    for own, other in zip(plan.actors, first.actors, strict=False):
        if (
            _shown_copy(own) != _shown_copy(other)
            or queues.setdefault(other.queue, own.queue) != own.queue
        ):
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


def _shown_copy(actor: Actor) -> tuple[object, ...]:
    """The facts of an actor that a simulation sees, but for its queue."""
    return type(actor), actor.id, actor.acts, actor.priority, actor.consumes, actor.produces


def _bare(register: Register) -> Register:
    return replace(register, credits=1)


def _unlike(plan: RankPlan, first: RankPlan, what: str) -> InternalError:
    return InternalError(
        f"ranks {first.rank} and {plan.rank} were planned as equal, but differ in {what}"
    )
