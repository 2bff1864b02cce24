"""Tasks: the acts of some steps of all plans as one graph of what waits for what.

An act of a compute or host queue is a task of that queue. A communication is one task of all its
ranks: it begins when all of them may begin it. What a task waits for are the versions that it reads and
the copies that it takes (`weft.actors.dependencies`), the act before it in the order of its communicator,
and the begin of its step. A compute or host queue takes, of the acts that may begin, the first by step,
priority, micro-batch and actor: as its machine does (`weft.actors.machine`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain
from typing import NamedTuple, TypeAlias, final

from weft.actors.dependencies import Dependencies, Tie
from weft.cached import cached_property
from weft.errors import InternalError
from weft.ir.plan import COMPUTE, HOST, Actor, Hold, RankPlan
from weft.units import NO_TIME, Seconds

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


# Seconds are multiples of this, so that sums of them are exact, whatever their order: of some hours.
TICK = 2.0**-36

# Of an act: its rank, actor, step and micro-batch.
Member: TypeAlias = "tuple[int, int, int, int]"


def in_ticks(seconds: float) -> Seconds:
    """Seconds, rounded to a multiple of `TICK`."""
    return Seconds(round(seconds / TICK) * TICK)


@final
class Lane(NamedTuple):
    """A queue of a rank that takes its acts by priority."""

    rank: int
    queue: str


@final
@dataclass(frozen=True)
class Tasks:
    """The tasks of some steps, by number; those of a step stand behind those of the step before.

    Attributes:
        members: the acts of each task: one, or one on each rank of a communication; none for the
            begin of a step.
        needs: the tasks that must have ended before each.
        after: of these, the one before in the order of a communicator, and the begins of its step.
        lane: the number of the lane of each task; -1 where it begins as soon as it may.
        turn: of the tasks of a lane that may begin, the one with the least turn does.
        seconds: how long each lasts.
        lanes: by number.
        steps: how many there are.
    """

    members: tuple[tuple[Member, ...], ...]
    needs: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    lane: tuple[int, ...]
    turn: tuple[int, ...]
    seconds: tuple[Seconds, ...]
    lanes: tuple[Lane, ...]
    steps: int

    def __len__(self) -> int:
        return len(self.members)

    def step_of(self, task: int) -> int:
        """The step of a task; of the begin of a step, the one before."""
        return self.members[task][0][2] if self.members[task] else -1

    @cached_property
    def number(self) -> dict[Member, int]:
        """The task of each act."""
        return {member: task for task, members in enumerate(self.members) for member in members}


def tasks_of(
    plans: Sequence[RankPlan],
    seconds: Mapping[int, Sequence[Seconds]],
    steps: int = 1,
    ahead: int = 1,
) -> Tasks:
    """The tasks of some steps of plans whose communicators have orders.

    Args:
        plans: of all ranks that share a communicator, or of those that stand for them.
        seconds: for each rank, how long an act of each of its actors takes.
        steps: how many.
        ahead: how many steps a rank has begun at a time: the next one begins when the first of
            these has ended on the rank.

    Raises:
        InternalError: when a communicator with micro-batches has no order.
    """
    return repeated(step_tasks(plans, seconds, ahead), steps)


def step_tasks(
    plans: Sequence[RankPlan], seconds: Mapping[int, Sequence[Seconds]], ahead: int = 1
) -> StepTasks:
    """The tasks of any step; see `tasks_of`."""
    ticks = {rank: [in_ticks(each) for each in own] for rank, own in seconds.items()}
    return StepTasks.of([RankActs.of(plan) for plan in plans], ticks, ahead)


def repeated(one: StepTasks, steps: int) -> Tasks:
    """The tasks of some steps.

    Args:
        one: those of any step.
        steps: how many.
    """
    acts = len(one.members) - one.begins
    begun = [len(one.members) if step >= one.ahead else acts for step in range(steps)]
    firsts = list(accumulate(begun, initial=0))[:steps]
    members: list[tuple[Member, ...]] = []
    for step, count in enumerate(begun):
        members += [
            tuple([(rank, actor, step, micro) for rank, actor, micro in members])
            for members in one.members[:count]
        ]
    return Tasks(
        tuple(members),
        _needs(one.needs, begun, firsts),
        _needs(one.after, begun, firsts),
        tuple(chain.from_iterable(one.lane[:count] for count in begun)),
        tuple(range(len(members))),
        tuple(chain.from_iterable(one.seconds[:count] for count in begun)),
        tuple([Lane(*each) for each in one.lanes]),
        steps,
    )


def _needs(
    needs: Sequence[Iterable[Need]], begun: Sequence[int], firsts: Sequence[int]
) -> tuple[tuple[int, ...], ...]:
    """The needs of the tasks of all steps, by number.

    Args:
        needs: of the tasks of a step.
        begun: how many tasks each step has.
        firsts: the number of the first task of each step.
    """
    ordered = [tuple(own) for own in needs]
    settled = max((since for own in ordered for _, _, since in own), default=0)
    found: list[tuple[int, ...]] = []
    for step, count in enumerate(begun):
        first = [firsts[step - back] if back <= step else 0 for back in range(settled + 1)]
        if step < settled:
            found += [
                tuple([first[back] + place for place, back, since in own if step >= since])
                for own in ordered[:count]
            ]
        else:
            found += [
                tuple([first[back] + place for place, back, _ in own]) for own in ordered[:count]
            ]
    return tuple(found)


# The tasks of one step, of which those of all steps are copies: what waits for what is the same in each of them.
#
# A task is known by its place in the step; what it needs, by a place and how many steps before. The first steps lack
# what would stand before the first one.


# What a task needs: a place in a step, how many steps before, and the first step in which it is there to be needed.
Need: TypeAlias = "tuple[int, int, int]"
# Of an act of a step: its rank, actor and micro-batch.
OfStep: TypeAlias = "tuple[int, int, int]"


@final
@dataclass(frozen=True)
class StepTasks:
    """The tasks of any step, by place: the acts, then the begins of ranks.

    Attributes:
        ahead: how many steps a rank has begun at a time; only later ones have begins.
        members: the acts of each task; a begin has none.
        needs: what each waits for.
        after: of these, the one before in the order of a communicator, and the begins of the step.
        lane: the number of the lane of each; -1 where it begins as soon as it may.
        seconds: how long each lasts.
        lanes: rank and queue, by number.
        begins: how many of the tasks are begins; they stand last.
    """

    ahead: int
    members: list[list[OfStep]] = field(default_factory=list)
    needs: list[dict[Need, None]] = field(default_factory=list)
    after: list[dict[Need, None]] = field(default_factory=list)
    lane: list[int] = field(default_factory=list)
    seconds: list[Seconds] = field(default_factory=list)
    lanes: dict[tuple[int, str], int] = field(default_factory=dict)
    begins: int = 0

    @staticmethod
    def of(
        ranks: Sequence[RankActs], seconds: Mapping[int, Sequence[Seconds]], ahead: int
    ) -> StepTasks:
        """The tasks of a step of all ranks.

        Args:
            ranks: that take part.
            seconds: for each rank, how long an act of each of its actors takes.
            ahead: how many steps a rank has begun at a time.
        """
        found = StepTasks(ahead, begins=len(ranks))
        met: dict[tuple[str, int, int], int] = {}
        places = [found._placed(rank, seconds[rank.plan.rank], met) for rank in ranks]
        acts = len(found.members)
        for number, (rank, place) in enumerate(zip(ranks, places, strict=True)):
            begin = found._new(-1)
            found.needs[begin].update(((own, ahead, ahead), None) for own in place.values())
            found._tie(rank, place, (acts + number, 0, ahead))
        return found

    def _new(self, lane: int) -> int:
        self.members.append([])
        self.needs.append({})
        self.after.append({})
        self.lane.append(lane)
        self.seconds.append(NO_TIME)
        return len(self.members) - 1

    def _placed(
        self, rank: RankActs, seconds: Sequence[Seconds], met: dict[tuple[str, int, int], int]
    ) -> dict[tuple[int, int], int]:
        """Give the acts of a rank their places; a communication has the same on all its ranks."""
        own, found = rank.plan.rank, dict[tuple[int, int], int]()
        for queue, acts in rank.acts.items():
            meeting = meets(queue)
            lane = -1 if meeting else self.lanes.setdefault((own, queue), len(self.lanes))
            for actor, micro in acts:
                task = met.get((queue, rank.place[actor], micro)) if meeting else None
                if task is None:
                    task = self._new(lane)
                    if meeting:
                        met[queue, rank.place[actor], micro] = task
                found[actor, micro] = task
                self.members[task].append((own, actor, micro))
                # A communication lasts as long as its slowest rank says.
                self.seconds[task] = max(self.seconds[task], seconds[actor])
        return found

    def _tie(self, rank: RankActs, place: Mapping[tuple[int, int], int], begin: Need) -> None:
        for queue, acts in rank.acts.items():
            # In the order of a communicator; before the first act is the last of the step before.
            before = (place[acts[-1]], 1, 1) if meets(queue) and acts else None
            for act in acts:
                task = place[act]
                needs, after = self.needs[task], self.after[task]
                for other, part, back in rank.waits[act]:
                    needs[place[other, part], back, back] = None
                if before is not None:
                    after[before] = None
                    before = task, 0, 0
                after[begin] = None
                needs.update(after)
