"""The reason why plans that run together stand still: the cycle of acts, each of which waits for the next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic, TypeAlias, TypeVar, final

from weft.actors.dependencies import ActKey, dependencies
from weft.actors.messages import QueueStatistics, Waiting, actor_text
from weft.ir.plan import COMPUTE, HOST, Communicate, Compute, RankPlan
from weft.units import Seconds

# An actor of a rank.
Who: TypeAlias = tuple[int, int]


def deadlock_text(
    plans: Sequence[RankPlan], ended: Collection[tuple[int, int, int]], ordered: bool
) -> str:
    """The cycle as text, one act per line.

    Args:
        plans: of all ranks, which hang in their first step.
        ended: the acts that have ended: (rank, actor, micro-batch).
        ordered: true if communicators keep the orders of the plans.
    """
    graph = _WaitForGraph(plans, ended, ordered)
    lines = [f"  {graph.text(who)} waits for {graph.awaited(who)[1]}" for who in graph.cycle()]
    return "\n".join(["the plan would hang: these actors wait for each other:", *lines])


@final
class _WaitForGraph:
    """The waits of all ranks: an edge from each actor that has acts left to each that it waits for."""

    def __init__(
        self, plans: Sequence[RankPlan], ended: Collection[tuple[int, int, int]], ordered: bool
    ) -> None:
        self._plans = {plan.rank: plan for plan in plans}
        self._ordered = ordered
        self._ended = ended
        # How often each actor has acted; its acts end in order.
        self._acted = Counter((rank, id) for rank, id, _ in ended)
        # The actors of each communication, by each of them.
        self._meeting_of: dict[Who, list[Who]] = {}
        meetings: dict[tuple[str, int], list[Who]] = {}
        for plan in plans:
            for queue, own in plan.on_queue.items():
                for place, actor in enumerate(own if queue not in (COMPUTE, HOST) else ()):
                    members = meetings.setdefault((queue, place), [])
                    members.append((plan.rank, actor.id))
                    self._meeting_of[plan.rank, actor.id] = members

    def cycle(self) -> list[Who]:
        """The first cycle that one runs into from the first that waits."""
        chain: list[Who] = []
        who: Who | None = next(
            (plan.rank, actor.id)
            for plan in self._plans.values()
            for own in plan.on_queue.values()
            for actor in own
            if self._acted[plan.rank, actor.id] < actor.acts
        )
        while who is not None and who not in chain:
            chain.append(who)
            who = self.awaited(who)[0]
        return chain[chain.index(who) :] if who is not None else chain

    def text(self, who: Who) -> str:
        """An act in words: whose, for what, and which."""
        rank, id = who
        actor = self._plans[rank].actors[id]
        micro = f" for micro-batch {self._acted[who]}" if actor.acts > 1 else ""
        phase = ""
        if isinstance(actor, Compute | Communicate):
            phase = f"{actor.phase.kind} of stage {actor.phase.stage}"
        return f"rank {rank}: {phase}{micro}, {actor_text(actor)}".replace(": ,", ":")

    def awaited(self, who: Who) -> tuple[Who | None, str]:
        """An actor that the next act of the given actor waits for, and why."""
        own = (*self._lacking(who), *self._others_turn(who))
        absent = (
            (other, f"rank {other[0]} to take part")
            for other in self._meeting_of.get(who, ())
            if any(self._lacking(other)) or any(self._others_turn(other))
        )
        return next(iter((*own, *absent)), (None, "nothing"))

    def _lacking(self, who: Who) -> Iterator[tuple[Who, str]]:
        """The versions and copies that the next act of an actor lacks."""
        rank, id = who
        plan = self._plans[rank]
        for need in dependencies(plan, ActKey(id, self._acted[who])):
            if self._acted[rank, need.act.actor] <= need.act.number:
                copies = plan.register_of[need.register].credits
                copy = f"a free copy of {need.register}, of {copies}"
                yield (rank, need.act.actor), copy if need.copy else need.register

    def _others_turn(self, who: Who) -> Iterator[tuple[Who, str]]:
        """The actor whose turn it is on an actor's queue."""
        rank, id = who
        plan = self._plans[rank]
        queue = plan.actors[id].queue
        if self._ordered and who in self._meeting_of:
            orders = (order.acts for order in plan.orders if order.queue == queue)
            usual = [(actor.id, 0) for actor in plan.on_queue[queue]]
            left = ((a, m) for a, m in next(orders, usual) if (rank, a, m) not in self._ended)
            turn, _ = next(left)
            if turn != id:
                yield (rank, turn), f"its turn on {queue}"


def root_cause(plan: RankPlan, statistics: Iterable[QueueStatistics]) -> tuple[int, ...]:
    """The actor that most actors wait for, directly or not, or the actors of a wait cycle.

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
    """The waits between actors, each followed to the last actor of its chain.

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


# The speed at which a marked graph can turn: the largest ratio of time to tokens over its cycles.
#
# In the long run every node of a marked graph acts once in `max over cycles (seconds / tokens)` and not
# faster (Ramchandani, "Analysis of asynchronous concurrent systems by timed Petri nets", 1974). The
# ratio is found as Lawler does ("Combinatorial Optimization", 1976, section 3.13: a cycle with
# `seconds - ratio * tokens > 0` shows that the ratio is larger), with the ratio of the cycle just
# found as the next guess instead of bisection (Dinkelbach 1967), so that it ends at the exact value.


Node = TypeVar("Node", bound=Hashable)

# Gains below this part of all seconds are rounding.
_ROUNDING = 1e-12


@final
@dataclass(frozen=True, slots=True)
class Edge(Generic[Node]):
    """`target` acts for the n-th time only after `source` has acted `n - tokens` times.

    Attributes:
        seconds: how long an act of `source` takes.
        label: a note of the caller.
    """

    source: Node
    target: Node
    seconds: Seconds
    tokens: int
    label: object = None


def max_cycle_ratio(edges: Sequence[Edge[Node]]) -> tuple[Seconds, tuple[Edge[Node], ...]]:
    """The largest seconds per token over all cycles, and a cycle that has it.

    Returns:
        (0, ()) without a cycle that takes time; infinity and the cycle if a cycle holds
        no token: the graph then has a deadlock.
    """
    number: dict[Node, int] = {}
    arcs = [
        (
            number.setdefault(e.source, len(number)),
            number.setdefault(e.target, len(number)),
            e.seconds,
            e.tokens,
        )
        for e in edges
    ]
    ratio = Seconds(0.0)
    best: tuple[Edge[Node], ...] = ()
    while cycle := _cycle_above(edges, arcs, len(number), ratio):
        seconds, tokens = sum(e.seconds for e in cycle), sum(e.tokens for e in cycle)
        if not tokens:
            return Seconds(math.inf), cycle
        if best and seconds / tokens <= ratio:
            break
        ratio, best = Seconds(seconds / tokens), cycle
    return ratio, best


def _cycle_above(
    edges: Sequence[Edge[Node]],
    arcs: Sequence[tuple[int, int, Seconds, int]],
    nodes: int,
    ratio: Seconds,
) -> tuple[Edge[Node], ...]:
    """A cycle whose `seconds - ratio * tokens` is positive; () if there is none. Bellman and Ford's longest paths.

    Args:
        edges: of the graph.
        arcs: the numbers of their sources and targets, their seconds and tokens.
        nodes: their number.
        ratio: seconds per token.
    """
    weighted = [
        (a, b, seconds - ratio * tokens, index)
        for index, (a, b, seconds, tokens) in enumerate(arcs)
    ]
    rounding = _ROUNDING * (sum([abs(weight) for _, _, weight, _ in weighted]) + 1e-300)
    longest = [0.0] * nodes
    via, parents = [-1] * nodes, [-1] * nodes
    for _ in range(nodes + 1):
        changed = False
        for a, b, weight, index in weighted:
            if longest[a] + weight > longest[b] + rounding:
                longest[b], via[b], parents[b], changed = longest[a] + weight, index, a, True
        if not changed:
            return ()
        cycle = _cycle_of(parents)
        if cycle:
            return tuple(edges[via[node]] for node in reversed(cycle))
    return ()


def _cycle_of(parents: Sequence[int]) -> list[int]:
    """A cycle of the graph in which each node has one parent, or -1; from a node to its parent and on."""
    seen = [0] * len(parents)
    for root in range(len(parents)):
        path, node = [], root
        while node >= 0 and not seen[node]:
            seen[node] = root + 1
            path.append(node)
            node = parents[node]
        if node >= 0 and seen[node] == root + 1:
            return path[path.index(node) :]
    return []
