"""Changes of plans as changes of tasks: what an act takes, the copies of a register, priorities, orders.

Only what changes is made anew. A change with all acts of all steps of an actor is one `Change`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import final

from weft.ir.plan import RankPlan
from weft.simulator.delta.evaluation import Change
from weft.simulator.timing.tasks import Member, Tasks, in_ticks, waits_of
from weft.units import Seconds


@final
class Changes:
    """Makes changes of the tasks of some plans.

    Args:
        plans: that the tasks are of.
        tasks: as `weft.simulator.timing.tasks.tasks_of` makes them.
    """

    def __init__(self, plans: Sequence[RankPlan], tasks: Tasks) -> None:
        self._plans = {plan.rank: plan for plan in plans}
        self._tasks = tasks
        self._waits: dict[tuple[int, int], dict[int, tuple[tuple[int, int, int], ...]]] = {}

    def lasting(self, rank: int, seconds: Mapping[int, Seconds]) -> Change:
        """Acts of some actors of a rank last so many seconds; a communication on all its ranks."""
        found = {}
        for actor, lasts in seconds.items():
            found.update(dict.fromkeys(self._acts(rank, actor), in_ticks(lasts)))
        return Change(seconds=found)

    def credits(self, rank: int, register: str, credits: int) -> Change:
        """A register of a rank has so many copies. It stays so for the changes that are made after."""
        plan = self._plans[rank]
        registers = tuple(
            replace(each, credits=credits) if each.value.name == register else each
            for each in plan.registers
        )
        producer = plan.register_of[register].producer
        self._plans[rank] = replace(plan, registers=registers)
        self._waits.pop((rank, producer), None)
        return Change(needs={task: self._needs(task) for task in self._acts(rank, producer)})

    def priorities(self, rank: int, priorities: Mapping[int, int]) -> Change:
        """Actors of one lane of a rank have other priorities; those that are missing keep theirs."""
        plan = self._plans[rank]
        queue = plan.actors[next(iter(priorities))].queue
        acts = [
            (step, priorities.get(actor.id, actor.priority), micro, actor.id)
            for step in range(self._tasks.steps)
            for actor in plan.on_queue[queue]
            for micro in range(actor.acts)
        ]
        number = self._tasks.number
        tasks = [number[rank, actor, step, micro] for step, _, micro, actor in sorted(acts)]
        turns = sorted(self._tasks.turn[task] for task in tasks)
        found = zip(tasks, turns, strict=True)
        return Change(turns={task: turn for task, turn in found if self._tasks.turn[task] != turn})

    def order(self, rank: int, acts: Sequence[tuple[int, int]]) -> Change:
        """The communicator of some acts (actor, micro-batch) of a rank runs them in this order, in every step."""
        number, before = self._tasks.number, None
        old = self._chain(rank, acts)
        needs = {}
        for step in range(self._tasks.steps):
            for actor, micro in acts:
                task = number[rank, actor, step, micro]
                own = set(self._needs(task)) - {old.get(task)} | self._waited(task)
                needs[task] = tuple(sorted(own if before is None else own | {before}))
                before = task
        return Change(needs=needs)

    def _chain(self, rank: int, acts: Sequence[tuple[int, int]]) -> dict[int, int]:
        """For each task of a communicator, the one before it in the order that it had."""
        number = self._tasks.number
        every = {
            number[rank, actor, step, micro]
            for step in range(self._tasks.steps)
            for actor, micro in acts
        }
        return {task: one for task in every for one in self._tasks.after[task] if one in every}

    def _acts(self, rank: int, actor: int) -> list[int]:
        number, acts = self._tasks.number, self._plans[rank].actors[actor].acts
        return [
            number[rank, actor, step, micro]
            for step in range(self._tasks.steps)
            for micro in range(acts)
        ]

    def _needs(self, task: int) -> tuple[int, ...]:
        """All that a task waits for, as the plans are now."""
        return tuple(sorted({*self._tasks.after[task], *self._waited(task)}))

    def _waited(self, task: int) -> set[int]:
        """The acts whose versions and copies a task waits for."""
        number, found = self._tasks.number, set[int]()
        for rank, actor, step, micro in self._tasks.members[task]:
            for other, part, back in self._waits_of(rank, actor)[micro]:
                member: Member = (rank, other, step - back, part)
                if step >= back:
                    found.add(number[member])
        return found

    def _waits_of(self, rank: int, actor: int) -> dict[int, tuple[tuple[int, int, int], ...]]:
        key = rank, actor
        if key not in self._waits:
            found = waits_of(self._plans[rank], actor)
            self._waits[key] = {micro: waits for (_, micro), waits in found}
        return self._waits[key]
