"""The root cause when a rank stands still: whom the actors that wait wait for in the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import final

from weft.actors.statistics import QueueStatistics, Waiting
from weft.ir.plan import RankPlan


def root_cause(plan: RankPlan, statistics: Iterable[QueueStatistics]) -> tuple[int, ...]:
    """The actor that most others wait for in the end, or the actors of a cycle of waiting.

    Args:
        plan: the rank's plan.
        statistics: of all its queues.

    Returns:
        Ids of actors; empty when nothing waits.
    """
    graph = _LastWaited(plan, list(statistics))
    ends = Counter(graph.end(id) for id in graph.waiting)
    ends.update(graph.end(id) for id in graph.running)
    return max(ends, key=lambda end: (ends[end], end), default=())


@final
class _LastWaited:
    """The waits between actors, each followed to the one that is waited for in the end.

    Attributes:
        waiting: what each actor that waits lacks, by its id.
        running: the actors that run.
    """

    def __init__(self, plan: RankPlan, statistics: Sequence[QueueStatistics]) -> None:
        self.waiting: dict[int, Waiting] = {w.actor: w for q in statistics for w in q.waiting}
        self.running = {q.running.actor for q in statistics if q.running is not None}
        self._registers = {register.value.name: register for register in plan.registers}
        # Whose turn it is on the queue of each actor that waits: who runs there, or comes next in
        # order.
        self._turns = {w.actor: q.turn for q in statistics for w in q.waiting}

    def end(self, id: int) -> tuple[int, ...]:
        """The actor at the end of the chain that begins with `id`, or the cycle it runs into."""
        chain: list[int] = []
        while id not in chain:
            chain.append(id)
            following = self._awaited(id)
            if following is None:
                return (id,)
            id = following
        cycle = chain[chain.index(id) :]
        first = cycle.index(min(cycle))
        return tuple(cycle[first:] + cycle[:first])

    def _awaited(self, id: int) -> int | None:
        """An actor that this one waits for; None if it runs or has nothing left to do."""
        lacks = self.waiting.get(id)
        if lacks is None:
            return None
        if lacks.versions:
            return self._registers[lacks.versions[0]].producer
        if lacks.copies:
            readers = self._registers[lacks.copies[0]].consumers
            return next((id for id in readers if id in self.waiting or id in self.running), None)
        turn = self._turns[id]
        return None if turn == id else turn
