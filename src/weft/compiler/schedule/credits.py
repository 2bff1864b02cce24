"""Copies of the registers of a loop: as few as are live, as a preset says, or as many as pay and fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, final

from weft.actors.deadlock import Edge, max_cycle_ratio
from weft.compiler.context import Context
from weft.compiler.schedule.actor_graph import ActorGraph, Link, Node, Slot
from weft.compiler.schedule.draft import PlanDraft
from weft.compiler.schedule.presets import Preset
from weft.errors import StrategyError
from weft.ir.alias import copied_results, overwritable
from weft.ir.plan import (
    Actor,
    Collective,
    Communicate,
    Compute,
    Feed,
    LocalCall,
    LocalUpdate,
    RankPlan,
    Register,
    RegisterKind,
)
from weft.units import Bytes, Seconds

# Registers that get copies together: a rank, a stage or the name of one register, and which.
Group: TypeAlias = "tuple[int, int | str, str]"
# A cycle may be this much slower than the busiest queue: another copy would not pay.
ENOUGH = 1.02


def fewest_slots(graph: ActorGraph) -> dict[Slot, int]:
    """One slot for each register, and one for each micro-batch where all must be made before the first is read."""
    found: dict[Slot, int] = {}
    for link in _loop_links(graph):
        needed = graph.micro_batches if graph.crosses_barrier(link) else 1
        found[link.slot] = max(needed, found.get(link.slot, 1))
    return found


def preset_slots(graph: ActorGraph, preset: Preset) -> dict[Slot, int]:
    """The register copies of a named schedule.

    Raises:
        StrategyError: a stage must hold more micro-batches than it was given: all, before the first continues.
    """
    found = fewest_slots(graph)
    for link in _loop_links(graph):
        wanted = _of_link(graph, link, preset)
        found[link.slot] = max(found[link.slot], min(wanted, graph.micro_batches))
    return found


def _of_link(graph: ActorGraph, link: Link, preset: Preset) -> int:
    """The copies of a value on a link: as many as micro-batches in flight where a stage keeps it from forward to
    backward, two where it passes between queues. Tensors that arrive also wait for as many slots as their sender is
    ahead.
    """
    source, target = graph.actor(link.source), graph.actor(link.target)
    if source is None or target is None:
        return 1
    stage, every, kept = (
        source.phase.stage,
        graph.micro_batches,
        source.phase.kind != target.phase.kind,
    )
    ahead, most = 0, preset.in_flight(stage) if kept else 1
    if isinstance(source, Communicate):
        senders = (graph.actor(each.source) for each in graph.into[link.source])
        ahead = max((abs(stage - each.phase.stage) for each in senders if each), default=0)
    elif preset.given and kept and most < every and graph.crosses_barrier(link):
        raise StrategyError(
            f"in_flight={preset.given} lets stage {stage} hold {most} micro-batches, but it must hold all {every}: "
            f"they wait for one another before the first backward; give the stage {every}, or leave in_flight out"
        )
    crosses = source.queue != target.queue or stage != target.phase.stage
    return most + ahead if kept else 1 + max(ahead, int(crosses))


def enough_slots(graph: ActorGraph, room: Mapping[int, Bytes] | None = None) -> dict[Slot, int]:
    """The fewest copies with which the loop is as fast as its busiest queue allows.

    From the fewest that are live, registers on the slowest cycle get copies until the cycle ratio
    (`weft.actors.deadlock`) reaches the load of the busiest queue: on each cycle the registers that
    take the least memory.

    Args:
        room: for each rank, the bytes that more copies may take; unbounded by default.
    """
    search, goal = (
        _CopySearch(graph, fewest_slots(graph), dict(room) if room is not None else None),
        graph.busiest,
    )
    while True:
        ratio, cycle = max_cycle_ratio(graph.marked_graph(search.copies))
        if ratio <= goal * ENOUGH or not cycle or not search.loosen(cycle, goal):
            return search.copies


@final
@dataclass(slots=True)
class _CopySearch:
    """The search for copies.

    Attributes:
        room: bytes left on each rank, if there is a limit.
        groups: the registers of each group; all but those that cross a barrier have equally many
            copies.
    """

    graph: ActorGraph
    copies: dict[Slot, int]
    room: dict[int, Bytes] | None
    groups: dict[Group, list[Slot]] = field(default_factory=dict)
    group_of: dict[Slot, Group] = field(default_factory=dict)
    sizes: dict[Slot, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for link in _loop_links(self.graph):
            self.sizes[link.slot] = link.register.value.nbytes
            # Values kept for a stage's backward get copies together, those that arrive apart; all else alone.
            source, target = self.graph.actor(link.source), self.graph.actor(link.target)
            group: Group = (link.slot[0], link.slot[1], "passes")
            if source is not None and target is not None and source.phase.kind != target.phase.kind:
                arrives = isinstance(source, Communicate)
                kind = "arrives" if arrives else source.phase.kind
                group = link.slot[0], source.phase.stage, kind
            known = self.group_of.get(link.slot)
            if known is None or isinstance(known[1], str):
                self.group_of[link.slot] = group
        for slot, group in self.group_of.items():
            self.groups.setdefault(group, []).append(slot)

    def loosen(self, cycle: Sequence[Edge[Node]], goal: Seconds) -> bool:
        """Give copies to the registers of a cycle that take the least memory; False if none has room or use."""
        tokens, seconds = sum(e.tokens for e in cycle), sum(e.seconds for e in cycle)
        lack = max(1, math.ceil(seconds / (goal * ENOUGH) - 1e-9) - tokens)
        labels = [edge.label for edge in cycle if isinstance(edge.label, tuple)]
        # A variable that the loop writes has no second copy.
        loose = (label for label in labels if all(slot in self.group_of for slot in label))
        choices = []
        for label in loose:
            wanted = {slot for each in label for slot in self.groups[self.group_of[each]]}
            fewest = min(self.copies[each] for each in label)
            more = min(lack, self.graph.micro_batches - fewest)
            slots = tuple(sorted(slot for slot in wanted if self.copies[slot] == fewest))
            if more > 0:  # else it has a copy for every micro-batch
                choices.append((sum(self.sizes[slot] for slot in slots), slots, more))
        for _, slots, more in sorted(choices):
            if self._reserves(slots, more):
                for slot in slots:
                    self.copies[slot] += more
                return True
        return False

    def _reserves(self, slots: Iterable[Slot], more: int) -> bool:
        """Take room for copies; False if a rank has too little."""
        if self.room is None:
            return True
        needed: dict[int, int] = {}
        for slot in slots:
            needed[slot[0]] = needed.get(slot[0], 0) + more * self.sizes[slot]
        if any(size > self.room[rank] for rank, size in needed.items()):
            return False
        for rank, size in needed.items():
            self.room[rank] = Bytes(self.room[rank] - size)
        return True


def _loop_links(graph: ActorGraph) -> list[Link]:
    return [
        link
        for link in graph.links
        if link.register.rate > 1 and not link.register.full and link.register.kind != "control"
    ]


# Give every tensor that passes between actors a register, and every register its credits.
#
# Before: actors of one rank. After: its `RankPlan`, legal. Registers of a loop get more copies by the functions above.


# Two versions of a batch may exist: one that is read, one that the host fills meanwhile.
BATCH_CREDITS = 2
# Kinds of registers that are full when a step begins.
LASTING = ("parameter", "buffer", "state", "constant")


def give_credits(draft: PlanDraft, _: Context) -> PlanDraft:
    """The draft with its plan, with as few credits as one step at a time needs.

    With micro-batches or several stages, `schedule/schedule.py` gives more and proves the plan live together
    with those of the other ranks.
    """
    program, actors = draft.program, draft.actors
    kinds: dict[str, RegisterKind] = {item.value.name: item.role for item in program.inputs}
    rates = dict.fromkeys(program.loop, program.micro_batches)
    readers: dict[str, list[int]] = {}
    for actor in actors:
        for name in actor.consumes:
            readers.setdefault(name, []).append(actor.id)
        if isinstance(actor, Communicate):
            kinds.update((name, "communication") for name in actor.produces)
        for node in actor.nodes if isinstance(actor, Compute) else ():
            if isinstance(node, LocalCall) and node.op == "weft.offload":
                kinds.update((value.name, "host") for value in node.makes)
            elif isinstance(node, LocalUpdate) and actor.acts > 1:
                written = (node.target, *node.states)
                rates.update(dict.fromkeys(written, program.micro_batches))
    extra, registers = {control.value.name for control in draft.controls}, list[Register]()
    for actor in actors:
        credits = BATCH_CREDITS if isinstance(actor, Feed) else 1
        for name in actor.produces:
            if name not in extra:
                value, kind, rate = (
                    program.values[name],
                    kinds.get(name, "activation"),
                    rates.get(name, 1),
                )
                full, readers_of = kind in LASTING, tuple(readers.get(name, ()))
                registers.append(Register(value, kind, actor.id, readers_of, credits, full, rate))
    every = (*registers, *draft.controls)
    plan = RankPlan(program.rank, program.inputs, actors, every, program.micro_batches)
    return replace(draft, plan=reuse_buffers(plan))


# Writes over memory, stated in the plan: all-reduces over their input, and the values that must be copied before.
#
# Before: a plan with its registers. After: an all-reduce runs in place where nobody else holds the
# memory of its input, so gradients are reduced where they are, with no bucket to fill and to empty;
# and what a segment hands on out of the memory of a variable is a copy where the variable is
# rewritten.


def reuse_buffers(plan: RankPlan) -> RankPlan:
    """The plan with `in_place` of its all-reduces and `copies` of its segments."""
    over, actors = overwritable(plan), list[Actor]()
    for actor in plan.actors:
        if isinstance(actor, Compute) and (copies := copied_results(plan, actor)):
            actor = replace(actor, copies=copies)
        elif isinstance(actor, Communicate) and not over.isdisjoint(actor.consumes):
            each = tuple(
                replace(one, in_place=True)
                if isinstance(one, Collective)
                and one.kind == "all_reduce"
                and one.input.name in over
                else one
                for one in actor.collectives
            )
            actor = replace(actor, collectives=each)
        actors.append(actor)
    return replace(plan, actors=tuple(actors))
