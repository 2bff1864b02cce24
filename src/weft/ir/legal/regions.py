"""Rules for memory that is written over, and for the regions of segments that run as one."""

from __future__ import annotations

from collections.abc import Iterator

from weft.ir.plan import Collective, Communicate, Compute, LocalUpdate, RankPlan
from weft.ir.queries.alias import copied_results, overwritable


def in_place_is_last(plan: RankPlan) -> Iterator[str]:
    """An all-reduce writes over its input only where nobody else reads that memory, or will."""
    in_place = [
        (actor, each)
        for actor in plan.actors
        if isinstance(actor, Communicate)
        for each in actor.collectives
        if isinstance(each, Collective) and each.in_place
    ]
    allowed = overwritable(plan) if in_place else ()
    for actor, each in in_place:
        name = each.input.name
        if each.kind != "all_reduce":
            yield f"actor {actor.id} runs {each.kind} of {name} in place"
        elif name not in allowed:
            others = [id for id in plan.register_of[name].consumers if id != actor.id]
            who = f"actors {others} read it, too" if others else "others hold its memory"
            yield f"actor {actor.id} reduces {name} in place, but {who}"


def copies_complete(plan: RankPlan) -> Iterator[str]:
    """A segment copies the values of overwritten variables that it hands on, and nothing that stays inside."""
    for actor in plan.actors:
        if isinstance(actor, Compute):
            for name in sorted({*copied_results(plan, actor)} - {*actor.copies}):
                yield f"actor {actor.id} hands on {name} in memory of a variable that is overwritten"
            sources = (node.source for node in actor.nodes if isinstance(node, LocalUpdate))
            for name in sorted({*actor.copies}.difference(actor.produces, sources)):
                yield f"actor {actor.id} copies {name}, but does not hand it on"


def parts_inside(plan: RankPlan) -> Iterator[str]:
    """Parts of a segment begin at increasing places of its nodes."""
    for actor in plan.actors:
        if isinstance(actor, Compute) and actor.parts:
            inside = range(1, len(actor.nodes))
            if any(place not in inside for place in actor.parts):
                yield f"a part of actor {actor.id} begins outside of its {len(actor.nodes)} nodes"
            if list(actor.parts) != sorted(set(actor.parts)):
                yield f"the parts of actor {actor.id} are not in order: {list(actor.parts)}"
