"""Tasks: the acts of some steps of all plans as one dependency graph.

An act of a compute or host queue is a task of that queue. A communication is one task of all its
ranks: it begins when all of them may begin it. A task waits for the versions that it reads and the slots that it
takes (`weft.actors.dependencies`), the act before it in the order of its communicator, and the begin of its step. A
queue takes, of the acts that may begin, the first by step, priority, micro-batch and actor, as its machine does
(`weft.actors.machine`); a communicator without an order does so by the first of its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, chain, pairwise
from typing import NamedTuple, TypeAlias, final

from weft.actors.dependencies import waits_of
from weft.errors import InternalError
from weft.ir.plan import COMPUTE, HOST, Actor, Hold, RankPlan
from weft.units import NO_TIME, Seconds

# For an act: its rank, actor, step and micro-batch.
Member: TypeAlias = "tuple[int, int, int, int]"
# For an act of any step: its rank, actor and micro-batch.
OfStep: TypeAlias = "tuple[int, int, int]"
# What a task of any step needs: a place in a step, and how many steps before.
Need: TypeAlias = "tuple[int, int]"
# Seconds are multiples of this, so that sums of them are exact, whatever their order: of some hours.
TICK = 2.0**-36


def to_ticks(seconds: float) -> Seconds:
    """Seconds, rounded to a multiple of `TICK`."""
    return Seconds(round(seconds / TICK) * TICK)


def is_communicator(queue: str) -> bool:
    """True for the queue of a communicator: its acts are those of several ranks."""
    return queue not in (COMPUTE, HOST)


@final
class Lane(NamedTuple):
    """A queue, which runs one act at a time; a communicator's is that of all its ranks, `rank` the first."""

    rank: int
    queue: str


@final
@dataclass(frozen=True)
class Tasks:
    """The tasks of some steps, by number; those of a step are after those of the step before.

    Attributes:
        members: the acts of each task: one, or one on each rank of a communication; none for the
            begin of a step.
        needs: the tasks that must have ended before each.
        lane: the number of the lane of each task; -1 where it begins as soon as it may. The first task of a lane, by
            number, begins among those that may.
        seconds: how long each lasts.
        lanes: by number, those of communicators first.
    """

    members: tuple[tuple[Member, ...], ...]
    needs: tuple[tuple[int, ...], ...]
    lane: tuple[int, ...]
    seconds: tuple[Seconds, ...]
    lanes: tuple[Lane, ...]

    def __len__(self) -> int:
        return len(self.members)

    def step_of(self, task: int) -> int:
        """The step of a task; of the begin of a step, the one before."""
        return self.members[task][0][2] if self.members[task] else -1


@final
@dataclass(slots=True)
class StepTasks:
    """The tasks of any step, by place: the acts, then the begins of ranks. Tasks of all steps are copies of these.

    Attributes:
        ahead: how many steps a rank has begun at a time; only later ones have begins.
        lanes: by number.
        members: the acts of each task; a begin has none.
        needs: what each waits for.
        lane: the number of the lane of each; -1 of a begin.
        seconds: how long each lasts.
        begins: how many of the tasks are begins.
    """

    ahead: int
    lanes: tuple[Lane, ...]
    members: list[list[OfStep]] = field(default_factory=list)
    needs: list[dict[Need, None]] = field(default_factory=list)
    lane: list[int] = field(default_factory=list)
    seconds: list[Seconds] = field(default_factory=list)
    begins: int = 0

    def add(self, lane: int) -> int:
        """A task more; its place."""
        self.members.append([])
        self.needs.append({})
        self.lane.append(lane)
        self.seconds.append(NO_TIME)
        return len(self.members) - 1


def step_tasks(
    plans: Sequence[RankPlan],
    seconds: Mapping[int, Sequence[Seconds]],
    ahead: int = 1,
    *,
    ordered: bool = True,
) -> StepTasks:
    """The tasks of any step.

    Args:
        plans: of all ranks that share a communicator, or of those that stand for them.
        seconds: for each rank, how long an act of each of its actors takes.
        ahead: how many steps a rank has begun at a time: the next one begins when the first of
            these has ended on the rank.
        ordered: true if communicators keep the orders of the plans; otherwise they take what may begin.

    Raises:
        InternalError: when a communicator with micro-batches has no order, or its ranks do not meet equally often.
    """
    # The lanes of communicators, by number whatever ranks they have; then those of ranks.
    first = {q: plan.rank for plan in reversed(plans) for q in plan.on_queue if is_communicator(q)}
    lanes = [Lane(first[queue], queue) for queue in sorted(first, key=lambda q: (len(q), q))]
    lanes += [Lane(plan.rank, q) for plan in plans for q in plan.on_queue if not is_communicator(q)]
    found = StepTasks(ahead, tuple(lanes))
    number = {lane: place for place, lane in enumerate(found.lanes)}
    shared = {lane.queue: place for lane, place in number.items() if is_communicator(lane.queue)}
    met: dict[tuple[str, int, int], int] = {}
    places: dict[int, dict[tuple[int, int], int]] = {}
    for plan in plans:
        own = places[plan.rank] = {}
        for queue, actors in plan.on_queue.items():
            at = {actor.id: place for place, actor in enumerate(actors)} if queue in shared else {}
            lane = shared[queue] if at else number[Lane(plan.rank, queue)]
            for actor, micro in _acts(plan, queue, actors, ordered):
                task = met.get((queue, at[actor], micro)) if at else None
                if task is None:
                    task = found.add(lane)
                    if at:
                        met[queue, at[actor], micro] = task
                own[actor, micro] = task
                found.members[task].append((plan.rank, actor, micro))
                # A communication lasts as long as its slowest rank says.
                found.seconds[task] = max(found.seconds[task], seconds[plan.rank][actor])
    _check_met(found, plans)
    for plan in plans:
        _wait(found, plan, places[plan.rank], ordered)
    for own in places.values():
        # Acts wait for the begin of the step, which waits for the end of the step so many before.
        begin = found.add(-1)
        found.begins += 1
        found.needs[begin] = dict.fromkeys((task, ahead) for task in own.values())
        for task in own.values():
            found.needs[task][begin, 0] = None
    return found


def _acts(
    plan: RankPlan, queue: str, actors: Sequence[Actor], ordered: bool
) -> Sequence[tuple[int, int]]:
    if not (ordered and is_communicator(queue)):
        every = ((a.priority, micro, a.id) for a in actors for micro in range(a.acts))
        return [(id, micro) for _, micro, id in sorted(every)]
    for order in plan.orders:
        if order.queue == queue:
            return order.acts
    if any(actor.acts > 1 for actor in actors):
        raise InternalError(f"rank {plan.rank}: no order is given for the micro-batches of {queue}")
    return [(actor.id, 0) for actor in actors]


def _check_met(found: StepTasks, plans: Sequence[RankPlan]) -> None:
    """Check that all ranks of a communicator take part in whatever one of them does there."""
    ranks = [sum(lane.queue in plan.on_queue for plan in plans) for lane in found.lanes]
    for lane, members in zip(found.lane, found.members, strict=True):
        queue = found.lanes[lane].queue
        if is_communicator(queue) and len(members) != ranks[lane]:
            raise InternalError(f"the ranks of {queue} do not meet equally often there")


def _wait(
    found: StepTasks, plan: RankPlan, place: Mapping[tuple[int, int], int], ordered: bool
) -> None:
    needs = found.needs
    for act, waits in waits_of(plan):
        needs[place[act]].update({(place[other, part], back): None for other, part, back in waits})
    for actor in plan.actors:
        # The copy of a version that all acts of a step make is taken by the first of them.
        if not isinstance(actor, Hold) and any(
            plan.register_of[name].rate != actor.acts for name in actor.produces
        ):
            own = [place[actor.id, micro] for micro in range(actor.acts)]
            needs[own[0]][own[-1], 1] = None
            for before, task in pairwise(own):
                needs[task][before, 0] = None
    for queue, actors in plan.on_queue.items() if ordered else ():
        if is_communicator(queue):
            tasks = [place[act] for act in _acts(plan, queue, actors, ordered)]
            needs[tasks[0]][tasks[-1], 1] = None
            for before, task in pairwise(tasks):
                needs[task][before, 0] = None


def repeat_steps(one: StepTasks, steps: int) -> Tasks:
    """The tasks of some steps.

    Args:
        one: those of any step.
        steps: how many.
    """
    acts = len(one.members) - one.begins
    begun = [len(one.members) if step >= one.ahead else acts for step in range(steps)]
    members: list[tuple[Member, ...]] = []
    for step, count in enumerate(begun):
        members += [
            tuple([(rank, actor, step, micro) for rank, actor, micro in members])
            for members in one.members[:count]
        ]
    return Tasks(
        tuple(members),
        _needs(one, begun),
        tuple(chain.from_iterable(one.lane[:count] for count in begun)),
        tuple(chain.from_iterable(one.seconds[:count] for count in begun)),
        one.lanes,
    )


def _needs(one: StepTasks, begun: Sequence[int]) -> tuple[tuple[int, ...], ...]:
    """The needs of the tasks of all steps, by number; the first steps lack what would be before the first one.

    Args:
        one: those of any step.
        begun: how many tasks each step has.
    """
    firsts = list(accumulate(begun, initial=0))
    ordered = [tuple(own) for own in one.needs]
    settled = max((back for own in ordered for _, back in own), default=0)
    found: list[tuple[int, ...]] = []
    for step, count in enumerate(begun):
        first = [firsts[step - back] for back in range(min(step, settled) + 1)]
        if step >= max(settled, one.ahead):
            found += [
                tuple([first[back] + place for place, back in own]) for own in ordered[:count]
            ]
            continue
        found += [
            tuple(
                [
                    first[back] + place
                    for place, back in own
                    if back <= step and place < begun[step - back]
                ]
            )
            for own in ordered[:count]
        ]
    return tuple(found)
