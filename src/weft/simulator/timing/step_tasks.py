"""The tasks of one step, of which those of all steps are copies: what waits for what is the same in each of them.

A task is known by its place in the step; what it needs, by a place and how many steps before. The first steps lack
what would stand before the first one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias, final

from weft.simulator.timing.rank_acts import RankActs, meets
from weft.units import NO_TIME, Seconds

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
