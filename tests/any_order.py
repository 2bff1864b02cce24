"""One step of a rank in an order that chance chooses, of those that its queues, registers and waits allow."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from weft.actors.dependencies import dependencies_in_step
from weft.actors.messages import IssueSlot
from weft.compiler.memory.order import Moment
from weft.ir.plan import Hold, RankPlan

Act = tuple[int, int]


def any_order(
    plan: RankPlan, turns: Sequence[IssueSlot], random: Random, begins: float, waits: bool = True
) -> list[Moment]:
    """The moments of a step.

    Args:
        plan: of the rank.
        turns: of its acts; each queue keeps their order.
        random: chooses what happens next.
        begins: how often an act begins, of the times when one might begin and one might end.
        waits: whether acts wait for those of other queues as their turns say.
    """
    needs = dependencies_in_step(plan)
    of = {(turn.actor, turn.micro): turn for turn in turns}
    lanes: dict[object, list[Act]] = {}
    for turn in turns:
        lanes.setdefault(plan.actors[turn.actor].queue, []).append((turn.actor, turn.micro))
    for actor in plan.actors:
        if not isinstance(actor, Hold) and (actor.id, 0) not in of:
            lanes[actor.id] = [(actor.id, 0)]
    running: dict[object, Act] = {}
    ended: set[Act] = set()
    places: set[int] = set()
    count = 0
    found: list[Moment] = []
    while any(lanes.values()) or running:
        idle = [(queue, acts[0]) for queue, acts in lanes.items() if acts and queue not in running]
        free = [
            queue
            for queue, act in idle
            if ended.issuperset(needs[act]) and not (waits and act in of and of[act].waits > count)
        ]
        assert free or running, "the step is stuck"
        if free and (not running or random.random() < begins):
            queue = random.choice(free)
            running[queue] = lanes[queue].pop(0)
            found.append(Moment(True, *running[queue]))
        else:
            act = running.pop(random.choice(list(running)))
            ended.add(act)
            if act in of:
                places.add(of[act].place)
                while count in places:
                    count += 1
            found.append(Moment(False, *act))
    return found
