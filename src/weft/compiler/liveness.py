"""The proof that a plan cannot wait for itself."""

from __future__ import annotations

from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from weft.actors import actor_text
from weft.errors import InternalError
from weft.ir.plan import Communicate, RankPlan


def prove_live(plan: RankPlan) -> None:
    """Raise InternalError, with the cycle, unless every cycle of the plan's marked graph holds a credit.

    A register is two edges: from producer to consumer (marked when it is full at the start) and
    back (marked with its free copies). A communicator's actors run in order. A marked graph is live
    iff no cycle runs over unmarked edges only (Commoner, Holt, Even and Pnueli, 1971).
    """
    waits = _waits(plan)
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        lines = (
            f"  {actor_text(plan.actors[b])} waits for actor {a} over {waits[b][a]}"
            for a, b in pairwise(error.args[1])
        )
        text = "\n".join(lines)
        raise InternalError(f"rank {plan.rank} would wait for itself:\n{text}") from None


def _waits(plan: RankPlan) -> dict[int, dict[int, str]]:
    """For each actor, the actors that it waits for before its first act, and over what."""
    waits: dict[int, dict[int, str]] = {actor.id: {} for actor in plan.actors}
    for register in plan.registers:
        for consumer in register.consumers:
            if not register.full:
                waits[consumer][register.producer] = register.value.name
            if register.credits == register.full:
                waits[register.producer][consumer] = register.value.name
    for queue in {actor.queue for actor in plan.actors if isinstance(actor, Communicate)}:
        order = [actor.id for actor in plan.actors if actor.queue == queue]
        for first, second in pairwise(order):
            waits[second].setdefault(first, f"order of {queue}")
    return waits
