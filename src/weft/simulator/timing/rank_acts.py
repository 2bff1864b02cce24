"""The acts of one rank's plan in a step: in which order they stand on their queues, and what each waits for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from weft.actors.dependencies import Dependencies, Tie
from weft.errors import InternalError
from weft.ir.plan import COMPUTE, HOST, Actor, Hold, RankPlan

# What an act waits for: an actor's act for a micro-batch, so many steps before.
Wait: TypeAlias = "tuple[int, int, int]"


@final
@dataclass(frozen=True)
class RankActs:
    """The plan of a rank, with the acts of a step and what they wait for.

    Attributes:
        acts: (actor, micro-batch) of a step, by queue; a communicator's in their order.
        waits: of each act: (actor, micro-batch, how many steps before).
        place: of each communicating actor, its place in its queue, which is the same on all ranks.
    """

    plan: RankPlan
    acts: Mapping[str, tuple[tuple[int, int], ...]]
    waits: Mapping[tuple[int, int], tuple[Wait, ...]]
    place: Mapping[int, int]

    @staticmethod
    def of(plan: RankPlan) -> RankActs:
        acts = {queue: _acts(plan, queue, own) for queue, own in plan.on_queue.items()}
        shared = (own for queue, own in plan.on_queue.items() if meets(queue))
        place = {actor.id: n for own in shared for n, actor in enumerate(own)}
        return RankActs(plan, acts, dict(waits_of(plan)), place)


def meets(queue: str) -> bool:
    """True for the queue of a communicator: its acts are those of several ranks."""
    return queue not in (COMPUTE, HOST)


def _acts(plan: RankPlan, queue: str, own: Sequence[Actor]) -> tuple[tuple[int, int], ...]:
    """The acts of a step on a queue: in its order, or by priority, micro-batch and actor."""
    if not meets(queue):
        every = ((a.priority, micro, a.id) for a in own for micro in range(a.acts))
        return tuple((id, micro) for _, micro, id in sorted(every))
    for order in plan.orders:
        if order.queue == queue:
            return order.acts
    if any(actor.acts > 1 for actor in own):
        raise InternalError(f"rank {plan.rank}: no order is given for the micro-batches of {queue}")
    return tuple((actor.id, 0) for actor in own)


def waits_of(
    plan: RankPlan, only: int | None = None
) -> Iterator[tuple[tuple[int, int], tuple[Wait, ...]]]:
    """For each act of a step, those that it waits for: (actor, micro-batch, how many steps before).

    They are the same in all steps, where there are any. `only` is an actor, for its acts alone.
    """
    needs = Dependencies(plan)
    # In this step every version that the plan speaks of has been before.
    late = 1 + max((register.credits for register in plan.registers), default=0)
    for actor in plan.actors if only is None else (plan.actors[only],):
        if isinstance(actor, Hold):
            continue
        ties = tuple(dict.fromkeys(needs.ties(actor)))
        # The copy of a version that all acts of a step make is taken by the first of them.
        shared = any(plan.register_of[name].rate != actor.acts for name in actor.produces)
        for micro in range(actor.acts):
            found = _waits(ties, actor.acts, late, micro)
            if shared:
                back, before = divmod(micro - 1, actor.acts)
                found[actor.id, before, -back] = None
            yield (actor.id, micro), tuple(found)


def _waits(ties: Iterable[Tie], acts: int, late: int, micro: int) -> dict[Wait, None]:
    """Those that an act of the step `late` waits for, by the ties of its actor."""
    found: dict[Wait, None] = {}
    number = late * acts + micro
    for other, others, rate, behind, copy in ties:
        made = number * rate
        if copy and made % acts:
            continue  # an earlier act has taken the copy
        step, part = divmod((made // acts - behind + 1) * others // rate - 1, others)
        found[other, part, late - step] = None
    return found
