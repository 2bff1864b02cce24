"""The reason why plans that run together stand still: the cycle of acts, each of which waits for the next."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias, final

from weft.actors.machine import QueueMachine
from weft.actors.messages import Act
from weft.actors.statistics import Waiting, actor_text
from weft.ir.plan import Communicate, Compute, RankPlan, Register

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
