"""Writes over memory, stated in the plan: all-reduces over their input, and the values that must be copied before.

Before: a plan with its registers. After: an all-reduce runs in place where nobody else holds the
memory of its input, so gradients are reduced where they lie, with no bucket to fill and to empty;
and what a segment hands on out of the memory of a variable is a copy where the variable is
rewritten.
"""

from __future__ import annotations

from dataclasses import replace

from weft.ir.plan import Actor, Collective, Communicate, Compute, Exchange, RankPlan
from weft.ir.queries.alias import copied_results, overwritable


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
