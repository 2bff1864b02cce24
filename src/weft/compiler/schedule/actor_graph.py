"""The actors of all ranks as one graph, and the proof that the plan has no deadlock.

A communication is one node of the graph, on all its ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TypeAlias, final

from weft.actors import actor_text
from weft.actors.deadlock import Edge
from weft.cached import cached_property
from weft.errors import InternalError
from weft.ir.plan import Communicate, Compute, Hold, RankPlan, Register
from weft.units import Seconds

# An actor of a rank, or a communication: (queue, place among its actors).
Node: TypeAlias = "tuple[int, int] | tuple[str, int]"
# A register of a rank, by name.
Slot: TypeAlias = tuple[int, str]


@final
@dataclass(frozen=True)
class Link:
    """A register between two nodes."""

    slot: Slot
    register: Register
    source: Node
    target: Node


@final
@dataclass(frozen=True)
class ActorGraph:
    """All plans of a program together.

    Attributes:
        seconds: for each rank, how long an act of each of its actors takes.
    """

    plans: tuple[RankPlan, ...]
    seconds: Mapping[int, Sequence[Seconds]]

    @property
    def micro_batches(self) -> int:
        """The number of acts of a node of the loop."""
        return self.plans[0].micro_batches

    @cached_property
    def _ranks(self) -> dict[int, RankPlan]:
        return {plan.rank: plan for plan in self.plans}

    @cached_property
    def nodes(self) -> dict[Node, dict[int, int]]:
        """Every node, with the actor that it is on each of its ranks.

        Raises:
            InternalError: when the ranks of a communicator do not agree on how often they meet.
        """
        found: dict[Node, dict[int, int]] = {}
        meetings: dict[str, dict[int, int]] = {}
        for plan in self.plans:
            for actor in plan.actors:
                if isinstance(actor, Communicate):
                    counts = meetings.setdefault(actor.queue, {})
                    counts[plan.rank] = counts.get(plan.rank, -1) + 1
                    found.setdefault((actor.queue, counts[plan.rank]), {})[plan.rank] = actor.id
                elif not isinstance(actor, Hold):
                    found[plan.rank, actor.id] = {plan.rank: actor.id}
        for queue, counts in meetings.items():
            if len(set(counts.values())) > 1:
                raise InternalError(f"the ranks meet {counts} times on {queue}")
        return found

    @cached_property
    def node_of(self) -> dict[tuple[int, int], Node]:
        """The node of every actor of every rank."""
        return {(rank, id): node for node, own in self.nodes.items() for rank, id in own.items()}

    @cached_property
    def links(self) -> tuple[Link, ...]:
        """Every register between acting nodes, once for each reader."""
        return tuple(
            Link(
                (plan.rank, register.value.name),
                register,
                self.node_of[plan.rank, register.producer],
                self.node_of[plan.rank, reader],
            )
            for plan in self.plans
            for register in plan.registers
            if not isinstance(plan.actors[register.producer], Hold)
            for reader in register.consumers
        )

    @cached_property
    def into(self) -> dict[Node, list[Link]]:
        """The links that each node reads."""
        found: dict[Node, list[Link]] = {node: [] for node in self.nodes}
        for link in self.links:
            found[link.target].append(link)
        return found

    @cached_property
    def loop(self) -> frozenset[Node]:
        """The nodes that act for each micro-batch."""
        return frozenset(
            node
            for node, own in self.nodes.items()
            if all(self._ranks[rank].actors[id].acts > 1 for rank, id in own.items())
        )

    def actor(self, node: Node) -> Compute | Communicate | None:
        """The actor that a node is on the first of its ranks; None for the host's."""
        rank, id = next(iter(self.nodes[node].items()))
        actor = self._ranks[rank].actors[id]
        return actor if isinstance(actor, Compute | Communicate) else None

    @cached_property
    def levels(self) -> dict[Node, int]:
        """The number of barriers, waits for all acts of others, after which each node can begin.

        A register of rate 1 that is made over all micro-batches is a barrier for those that
        depend on it.

        Raises:
            InternalError: naming the cycle, when nodes wait for each other.
        """
        waits = {
            node: [x for x in links if not x.register.full] for node, links in self.into.items()
        }
        before = {node: {link.source for link in links} for node, links in waits.items()}
        try:
            order = tuple(TopologicalSorter(before).static_order())
        except CycleError as error:
            lines = (
                f"  {self._text(b)} waits for {self._text(a)}" for a, b in pairwise(error.args[1])
            )
            text = "\n".join(lines)
            raise InternalError(
                f"the plan would hang: these actors wait for each other:\n{text}"
            ) from None
        found: dict[Node, int] = {}
        for node in order:
            levels = (
                found[x.source] + (x.register.rate == 1 and x.source in self.loop)
                for x in waits[node]
            )
            found[node] = max(levels, default=0)
        return found

    def _text(self, node: Node) -> str:
        rank, id = next(iter(self.nodes[node].items()))
        actor = self._ranks[rank].actors[id]
        if not isinstance(actor, Compute | Communicate):
            return f"rank {rank}: {actor_text(actor)}"
        return f"rank {rank}: {actor.phase.kind} of stage {actor.phase.stage}, {actor_text(actor)}"

    def crosses_barrier(self, link: Link) -> bool:
        """True if a loop register is read only after all its versions have been made."""
        return link.register.rate > 1 and self.levels[link.source] < self.levels[link.target]

    @cached_property
    def lasts(self) -> dict[Node, Seconds]:
        """Seconds of an act of each node: its slowest rank's."""
        return {
            node: max(self.seconds[rank][id] for rank, id in own.items())
            for node, own in self.nodes.items()
        }

    @cached_property
    def busiest(self) -> Seconds:
        """Seconds that the queue with the most work is busy for each micro-batch."""
        loads: dict[tuple[int, str], float] = {}
        for plan in self.plans:
            for actor in plan.actors:
                node = self.node_of.get((plan.rank, actor.id))
                if node in self.loop and node is not None:
                    seat = plan.rank, actor.queue
                    loads[seat] = loads.get(seat, 0.0) + self.lasts[node]
        return Seconds(max(loads.values(), default=0.0))

    @cached_property
    def _between(self) -> list[tuple[Edge[Node], list[tuple[Slot, Register]]]]:
        """The data edges of the loop, each with the registers that hold its one node back for the other."""
        found: dict[tuple[Node, Node], list[tuple[Slot, Register]]] = {}
        for link in self.links:
            looped = link.register.rate > 1 and {link.source, link.target} <= self.loop
            if looped and not self.crosses_barrier(link):
                found.setdefault((link.source, link.target), []).append((link.slot, link.register))
        edges = []
        for (source, target), between in found.items():
            tokens = min(int(register.full) for _, register in between)
            edges.append((Edge(source, target, self.lasts[source], tokens), between))
        return edges

    def marked_graph(self, copies: Mapping[Slot, int]) -> list[Edge[Node]]:
        """The edges of the loop: data, and copies that are given back.

        Edges for copies have as labels the registers that have the fewest of all between their two
        nodes.
        """
        edges: list[Edge[Node]] = []
        for data, between in self._between:
            free = [
                copies.get(slot, register.credits) - register.full for slot, register in between
            ]
            fewest = min(free)
            slots = tuple(
                [slot for (slot, _), each in zip(between, free, strict=True) if each == fewest]
            )
            source, target = data.source, data.target
            edges.append(data)
            edges.append(Edge(target, source, self.lasts[target], fewest, slots))
        return edges


def with_copies(plan: RankPlan, copies: Mapping[Slot, int]) -> RankPlan:
    """The plan with other credits."""

    def given(register: Register) -> Register:
        credits = copies.get((plan.rank, register.value.name), register.credits)
        return register if credits == register.credits else replace(register, credits=credits)

    registers = tuple(map(given, plan.registers))
    return replace(plan, registers=registers)


def prove_live(plan: RankPlan) -> RankPlan:
    """The plan; InternalError, with the cycle, unless every cycle of its marked graph holds a credit.

    A register is two edges: from producer to consumer (marked when it is full at the start) and
    back (marked with its free copies). A communicator's actors run in order. A marked graph is live
    iff no cycle runs over unmarked edges only (Commoner, Holt, Even and Pnueli, 1971).
    """
    waits: dict[int, dict[int, str]] = {actor.id: {} for actor in plan.actors}
    for register in plan.registers:
        for consumer in register.consumers:
            if not register.full:
                waits[consumer][register.producer] = register.value.name
            if register.credits == register.full:
                waits[register.producer][consumer] = register.value.name
    for queue in {actor.queue for actor in plan.actors if isinstance(actor, Communicate)}:
        order = [actor.id for actor in plan.actors if actor.queue == queue]
        for first, second in pairwise(order):
            waits[second].setdefault(first, f"order of {queue}")
    try:
        TopologicalSorter(waits).prepare()
    except CycleError as error:
        lines = (
            f"  {actor_text(plan.actors[b])} waits for actor {a} over {waits[b][a]}"
            for a, b in pairwise(error.args[1])
        )
        text = "\n".join(lines)
        raise InternalError(f"rank {plan.rank} would wait for itself:\n{text}") from None
    return plan
