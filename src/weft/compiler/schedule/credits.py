"""Copies of the registers of a loop: as few as are live, as a preset says, or as many as pay and fit."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeAlias, final

from weft.actors.deadlock import Edge, max_cycle_ratio
from weft.compiler.schedule.actor_graph import ActorGraph, Link, Node, Slot
from weft.compiler.schedule.presets import Preset
from weft.errors import StrategyError
from weft.ir.alias import copied_results, overwritable
from weft.ir.legal.plans import verify_plan
from weft.ir.plan import (
    Actor,
    Collective,
    Communicate,
    Compute,
    Exchange,
    Feed,
    LocalCall,
    LocalProgram,
    LocalUpdate,
    LocalValue,
    RankPlan,
    Register,
    RegisterKind,
)
from weft.units import Bytes, Seconds

# Registers that get copies together: a rank, a stage or the name of one register, and which.
Group: TypeAlias = "tuple[int, int | str, str]"
# A cycle may be this much slower than the busiest queue: another copy would not pay.
ENOUGH = 1.02


def fewest_slots(web: ActorGraph) -> dict[Slot, int]:
    """One copy of everything, and one for each micro-batch where all must be made before the first is read."""
    found: dict[Slot, int] = {}
    for link in _loop_links(web):
        needed = web.micro_batches if web.crosses_barrier(link) else 1
        found[link.slot] = max(needed, found.get(link.slot, 1))
    return found


def preset_slots(web: ActorGraph, preset: Preset) -> dict[Slot, int]:
    """The copies that a named schedule gives.

    Raises:
        StrategyError: a stage must hold more micro-batches than it was given: all, before the first goes on.
    """
    found = fewest_slots(web)
    for link in _loop_links(web):
        _check_given(web, link, preset)
        wanted = _of_link(web, link, preset)
        found[link.slot] = max(found[link.slot], min(wanted, web.micro_batches))
    return found


def _check_given(web: ActorGraph, link: Link, preset: Preset) -> None:
    source, target = web.actor(link.source), web.actor(link.target)
    if not preset.given or not isinstance(source, Compute) or target is None:
        return
    stage, every = source.phase.stage, web.micro_batches
    most, kept = preset.in_flight(stage), source.phase.kind != target.phase.kind
    if kept and most < every and web.crosses_barrier(link):
        raise StrategyError(
            f"in_flight={preset.given} lets stage {stage} hold {most} micro-batches, but it must hold all {every}: "
            f"they wait for one another before the backward of the first; give it {every}, or leave in_flight out"
        )


def _of_link(web: ActorGraph, link: Link, preset: Preset) -> int:
    """The copies of a value on a link: as many as micro-batches in flight where a stage keeps it from forward to
    backward, two where it passes between queues. Tensors that arrive also wait for as many slots as their sender is
    ahead.
    """
    source, target = web.actor(link.source), web.actor(link.target)
    if source is None or target is None:
        return 1
    stage = source.phase.stage
    ahead = _ahead(web, link.source) if isinstance(source, Communicate) else 0
    if source.phase.kind != target.phase.kind:
        return preset.in_flight(stage) + ahead
    crosses = source.queue != target.queue
    return 1 + max(ahead, int(crosses or stage != target.phase.stage))


def _ahead(web: ActorGraph, node: Node) -> int:
    """The number of stages between those that send in a communication and the one that it is for."""
    reader = web.actor(node)
    assert reader is not None
    senders = [web.actor(link.source) for link in web.into[node]]
    stages = [sender.phase.stage for sender in senders if sender is not None]
    return max((abs(reader.phase.stage - stage) for stage in stages), default=0)


def enough_slots(web: ActorGraph, room: Mapping[int, Bytes] | None = None) -> dict[Slot, int]:
    """The fewest copies with which the loop turns as fast as its busiest queue allows.

    From the fewest that are live, registers on the slowest cycle get copies until the cycle ratio
    (`weft.actors.deadlock`) reaches the load of the busiest queue: on each cycle the registers that
    take the least memory.

    Args:
        room: for each rank, the bytes that more copies may take; unbounded by default.
    """
    return _Raise(web, fewest_slots(web), dict(room) if room is not None else None).run()


@final
@dataclass
class _Raise:
    """The search for copies.

    Attributes:
        room: bytes left on each rank, if there is a limit.
        groups: the registers of each group; all but those that cross a barrier have equally many
            copies.
    """

    web: ActorGraph
    copies: dict[Slot, int]
    room: dict[int, Bytes] | None
    groups: dict[Group, list[Slot]] = field(default_factory=dict)
    group_of: dict[Slot, Group] = field(default_factory=dict)
    sizes: dict[Slot, Bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for link in _loop_links(self.web):
            self.sizes[link.slot] = link.register.value.nbytes
            group = self._group(link)
            known = self.group_of.get(link.slot)
            if known is None or isinstance(known[1], str):
                self.group_of[link.slot] = group
        for slot, group in self.group_of.items():
            self.groups.setdefault(group, []).append(slot)

    def _group(self, link: Link) -> Group:
        """The group of a link: values kept for a stage's backward together, those that arrive apart; all else alone."""
        rank, name = link.slot
        source, target = self.web.actor(link.source), self.web.actor(link.target)
        if source is None or target is None or source.phase.kind == target.phase.kind:
            return rank, name, "passes"
        arrives = isinstance(source, Communicate)
        return rank, source.phase.stage, "arrives" if arrives else source.phase.kind

    def run(self) -> dict[Slot, int]:
        """Raise until it is enough, or nothing more may be raised."""
        goal = self.web.busiest
        while True:
            ratio, cycle = max_cycle_ratio(self.web.marked_graph(self.copies))
            if ratio <= goal * ENOUGH or not cycle or not self._raise(cycle, goal):
                return self.copies

    def _raise(self, cycle: Sequence[Edge[Node]], goal: Seconds) -> bool:
        tokens, seconds = sum(e.tokens for e in cycle), sum(e.seconds for e in cycle)
        lack = max(1, math.ceil(seconds / (goal * ENOUGH) - 1e-9) - tokens)
        labels = [edge.label for edge in cycle if isinstance(edge.label, tuple)]
        # A variable that the loop writes has no second copy.
        loose = (label for label in labels if all(slot in self.group_of for slot in label))
        choices = [self._choice(label, lack) for label in loose]
        for _, slots, more in sorted(c for c in choices if c is not None):
            if self._fits(slots, more):
                for slot in slots:
                    self.copies[slot] += more
                return True
        return False

    def _choice(self, label: Iterable[Slot], lack: int) -> tuple[int, tuple[Slot, ...], int] | None:
        """Bytes a copy, registers and copies that loosen an edge; None when it has a copy for every micro-batch."""
        wanted = {slot for each in label for slot in self.groups[self.group_of[each]]}
        fewest_slots = min(self.copies[each] for each in label)
        more = min(lack, self.web.micro_batches - fewest_slots)
        slots = tuple(sorted(slot for slot in wanted if self.copies[slot] == fewest_slots))
        return (sum(self.sizes[slot] for slot in slots), slots, more) if more > 0 else None

    def _fits(self, slots: Iterable[Slot], more: int) -> bool:
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


def _loop_links(web: ActorGraph) -> list[Link]:
    return [
        link
        for link in web.links
        if link.register.rate > 1 and not link.register.full and link.register.kind != "control"
    ]


# Give every tensor that passes between actors a register, and every register its credits.
#
# Before: the actors of one rank. After: its `RankPlan`, legal. Registers of a loop get more copies by `copies.py`.


# Two versions of a batch may exist: one that is read, one that the host fills meanwhile.
BATCH_CREDITS = 2


def with_credits(
    program: LocalProgram, actors: tuple[Actor, ...], controls: tuple[Register, ...] = ()
) -> RankPlan:
    """The plan of one rank, with as few credits as one step at a time needs.

    With micro-batches or several stages, `schedule/schedule.py` gives more and proves the plan live together
    with those of the other ranks.

    Args:
        controls: registers that only make actors wait (`schedule/gathers_first.py`).
    """
    kinds: dict[str, RegisterKind] = {item.value.name: item.role for item in program.inputs}
    for actor in actors:
        if isinstance(actor, Communicate):
            kinds.update((name, "communication") for name in actor.produces)
        elif isinstance(actor, Compute):
            calls = (node for node in actor.nodes if isinstance(node, LocalCall))
            away = (call for call in calls if call.op == "weft.offload")
            kinds.update((value.name, "host") for call in away for value in call.makes)
    readers: dict[str, list[int]] = {}
    for actor in actors:
        for name in actor.consumes:
            readers.setdefault(name, []).append(actor.id)
    extra = {register.value.name for register in controls}
    written = (
        name
        for actor in actors
        if isinstance(actor, Compute) and actor.acts > 1
        for node in actor.nodes
        if isinstance(node, LocalUpdate)
        for name in (node.target, *node.states)
    )
    rates = dict.fromkeys((*program.loop, *written), program.micro_batches)
    registers = tuple(
        _register(
            program.values[name],
            kinds.get(name, "activation"),
            actor,
            readers.get(name, []),
            rates.get(name, 1),
        )
        for actor in actors
        for name in actor.produces
        if name not in extra
    )
    plan = RankPlan(
        program.rank, program.inputs, actors, (*registers, *controls), program.micro_batches
    )
    return verify_plan(reuse_buffers(plan))


def _register(
    value: LocalValue, kind: RegisterKind, producer: Actor, consumers: list[int], rate: int
) -> Register:
    credits = BATCH_CREDITS if isinstance(producer, Feed) else 1
    full = kind in ("parameter", "buffer", "state", "constant")
    return Register(value, kind, producer.id, tuple(consumers), credits, full, rate)


# Writes over memory, stated in the plan: all-reduces over their input, and the values that must be copied before.
#
# Before: a plan with its registers. After: an all-reduce runs in place where nobody else holds the
# memory of its input, so gradients are reduced where they lie, with no bucket to fill and to empty;
# and what a segment hands on out of the memory of a variable is a copy where the variable is
# rewritten.


def reuse_buffers(plan: RankPlan) -> RankPlan:
    """The plan with `in_place` of its all-reduces and `copies` of its segments."""
    over = overwritable(plan)
    actors = tuple([_donated(plan, actor, over) for actor in plan.actors])
    return replace(plan, actors=actors)


def _donated(plan: RankPlan, actor: Actor, over: frozenset[str]) -> Actor:
    match actor:
        case Compute():
            copies = copied_results(plan, actor)
            return replace(actor, copies=copies) if copies else actor
        case Communicate() if not over.isdisjoint(actor.consumes):
            each = tuple([_in_place(one, over) for one in actor.collectives])
            return replace(actor, collectives=each)
    return actor


def _in_place(each: Exchange, over: frozenset[str]) -> Exchange:
    if isinstance(each, Collective) and each.kind == "all_reduce" and each.input.name in over:
        return replace(each, in_place=True)
    return each
