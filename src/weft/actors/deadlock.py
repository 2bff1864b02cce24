"""The reason why plans that run together stand still: the cycle of acts, each of which waits for the next."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar, final

from weft.actors.machine import QueueMachine
from weft.actors.messages import Act, QueueStatistics, Waiting, actor_text
from weft.ir.plan import Communicate, Compute, RankPlan, Register
from weft.units import Seconds

# An actor of a rank.
Who: TypeAlias = tuple[int, int]


@final
class Meeting(NamedTuple):
    """A communication of several ranks: number `place` of its queue, for a micro-batch."""

    queue: str
    place: int
    micro: int


def deadlock_text(
    plans: Sequence[RankPlan],
    machines: Mapping[tuple[int, str], QueueMachine],
    members: Mapping[str, Sequence[int]],
    places: Mapping[Who, int],
    gathered: Mapping[Meeting, Mapping[int, Act]],
) -> str:
    """The cycle in words, an act a line.

    Args:
        plans: of all ranks.
        machines: of all ranks and queues, none of which can go on.
        members: for each communicator's queue, its ranks.
        places: for each communicating actor, its place among those of its queue.
        gathered: communications that some ranks have started and wait in for the others.
    """
    graph = _WaitForGraph(plans, machines, members, places, gathered)
    cycle = graph.cycle()
    lines = [f"  {graph.text(who)} waits for {graph.reason(who)}" for who in cycle]
    return "\n".join(["the plan would hang: these wait for each other:", *lines])


@final
class _WaitForGraph:
    """The waits of all ranks: an edge from each that waits to each that it waits for."""

    def __init__(
        self,
        plans: Sequence[RankPlan],
        machines: Mapping[tuple[int, str], QueueMachine],
        members: Mapping[str, Sequence[int]],
        places: Mapping[Who, int],
        gathered: Mapping[Meeting, Mapping[int, Act]],
    ) -> None:
        self._plans = {plan.rank: plan for plan in plans}
        self._members, self._places = members, places
        self._at = {
            (rank, plan.actors[id].queue, place): id
            for (rank, id), place in places.items()
            for plan in (self._plans[rank],)
        }
        self._registers: dict[int, dict[str, Register]] = {
            plan.rank: {each.value.name: each for each in plan.registers} for plan in plans
        }
        statistics = {seat: machine.statistics() for seat, machine in machines.items()}
        self._waiting: dict[Who, Waiting] = {
            (rank, each.actor): each
            for (rank, _), found in statistics.items()
            for each in found.waiting
        }
        self._turns = {seat: found.turn for seat, found in statistics.items()}
        self._gathered = {
            (rank, act.actor): (meeting, set(there))
            for meeting, there in gathered.items()
            for rank, act in there.items()
        }

    def cycle(self) -> list[Who]:
        """The first cycle that one runs into from the first that waits."""
        chain: list[Who] = []
        who: Who | None = next(iter([*self._gathered, *self._waiting]))
        while who is not None and who not in chain:
            chain.append(who)
            who = self._next(who)[0]
        return chain[chain.index(who) :] if who is not None else chain

    def text(self, who: Who) -> str:
        """An act in words: whose, for what, and which."""
        rank, id = who
        actor = self._plans[rank].actors[id]
        micro = ""
        if actor.acts > 1:
            micro = f" for micro-batch {self._micro(who)}"
        phase = ""
        if isinstance(actor, Compute | Communicate):
            phase = f"{actor.phase.kind} of stage {actor.phase.stage}"
        return f"rank {rank}: {phase}{micro}, {actor_text(actor)}".replace(": ,", ":")

    def reason(self, who: Who) -> str:
        """Say in words why an act waits."""
        return self._next(who)[1]

    def _micro(self, who: Who) -> int:
        if who in self._gathered:
            return self._gathered[who][0].micro
        return self._waiting[who].micro

    def _next(self, who: Who) -> tuple[Who | None, str]:
        """An act that this one waits for, and why."""
        return next(self._reasons(who), (None, "nothing"))

    def _reasons(self, who: Who) -> Iterator[tuple[Who, str]]:
        rank, id = who
        if who in self._gathered:
            meeting, there = self._gathered[who]
            yield from self._absent(meeting.queue, meeting.place, there)
            return
        if who not in self._waiting:
            return
        lacks, registers = self._waiting[who], self._registers[rank]
        for name in lacks.versions:
            yield (rank, registers[name].producer), name
        for name in lacks.copies:
            for reader in self._holders(who, registers[name]):
                yield (rank, reader), f"a free copy of {name}, of {registers[name].credits}"
        queue = self._plans[rank].actors[id].queue
        turn = self._turns[rank, queue]
        if turn is not None and turn != id:
            yield (rank, turn), f"its turn on {queue}"
        elif queue in self._members:
            ready = {rank for rank in self._members[queue] if self._is_ready(rank, who)}
            yield from self._absent(queue, self._places[who], ready)

    def _absent(self, queue: str, place: int, there: set[int]) -> Iterator[tuple[Who, str]]:
        for rank in self._members[queue]:
            if rank not in there:
                yield (rank, self._at[rank, queue, place]), f"rank {rank} to take part"

    def _is_ready(self, rank: int, who: Who) -> bool:
        """True where a rank could take part in the communication of `who`."""
        queue = self._plans[who[0]].actors[who[1]].queue
        other = self._waiting.get((rank, self._at[rank, queue, self._places[who]]))
        return other is not None and not other.versions and not other.copies

    def _holders(self, who: Who, register: Register) -> Iterator[int]:
        """Readers that have not given back the copy that the next version would take."""
        version = self._version(who, register) + register.full - register.credits
        for reader in register.consumers:
            other = who[0], reader
            there = other in self._waiting or other in self._gathered
            if there and self._version(other, register) <= version:
                yield reader

    def _version(self, who: Who, register: Register) -> int:
        """The version of a register that the next act of an actor makes or reads."""
        return self._micro(who) * register.rate // self._plans[who[0]].actors[who[1]].acts


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
        label: whatever the caller wants to know of the edge.
    """

    source: Node
    target: Node
    seconds: Seconds
    tokens: int
    label: object = None


def max_cycle_ratio(edges: Sequence[Edge[Node]]) -> tuple[Seconds, tuple[Edge[Node], ...]]:
    """The largest seconds per token over all cycles, and a cycle that has it.

    Returns:
        (0, ()) without a cycle that takes time; infinity and the cycle where one holds no token,
        which means that the graph stands still.
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
