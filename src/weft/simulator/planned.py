"""A planned step: what a simulation has to know of a program, as data; nothing in it says how it was planned."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, final

from weft.boxing import BoxingStep, steps
from weft.boxing.routes import numbered_layouts, routes
from weft.boxing.transfer import local_transfer, transfer_ranks
from weft.cached import cached_property
from weft.errors import RuleError
from weft.hardware.costs import Cost, Costs
from weft.hardware.durations import transfer_pieces
from weft.ir.logical import Box, Call, LogicalGraph
from weft.ir.plan import (
    Communicate,
    Communicator,
    Compute,
    Exchange,
    LocalValue,
    RankPlan,
    Transfer,
)
from weft.layout import region_size
from weft.ops import flops
from weft.units import ITEM_SIZE, NO_BYTES, Bytes, Flops


@final
@dataclass(frozen=True)
class PlannedStep:
    """The plans of a step, and the facts about its ranks.

    Attributes:
        graph: the logical graph that they were made of; its calls know the user's lines.
        plans: of the representative ranks; communicators have orders.
        communicators: of all ranks.
        ranks: all of them.
        classes: for each rank, the one that stands for it; missing ones stand for themselves.
        families: for each communicator, the ids of those that run what it runs at the same time.
        peaks: bytes that ranks with a plan hold when they hold most.
        work: floating-point operations of the model's step without recomputation; None to count those of `graph`.
        samples: of a step; 0 if that is not known.
        tokens: of a step; 0 if its samples are not sequences of tokens.
    """

    graph: LogicalGraph
    plans: Sequence[RankPlan]
    communicators: Sequence[Communicator]
    ranks: Sequence[int]
    classes: Mapping[int, int] = field(default_factory=dict)
    families: Mapping[int, Sequence[int]] = field(default_factory=dict)
    peaks: Mapping[int, Bytes] = field(default_factory=dict)
    work: Flops | None = None
    samples: int = 0
    tokens: int = 0

    @cached_property
    def members(self) -> dict[int, list[int]]:
        """The ranks that each planned rank stands for, itself among them."""
        found: dict[int, list[int]] = {plan.rank: [] for plan in self.plans}
        alone = {self.plans[0].rank} if len(self.plans) == 1 else set[int]()
        for rank in self.ranks:
            # One plan without classes stands for all ranks: they do not differ in what they do when.
            stands = self.classes.get(rank, next(iter(alone), rank))
            found.setdefault(stands, []).append(rank)
        return {rank: of for rank, of in found.items() if of}

    @cached_property
    def flops(self) -> Flops:
        """Floating-point operations of a step, of all ranks together."""
        return self.work if self.work is not None else step_flops(self.graph)[0]

    @cached_property
    def dtype(self) -> str:
        """The dtype in which most operations are done: the peak that they are compared with."""
        return step_flops(self.graph)[1]


def step_flops(graph: LogicalGraph) -> tuple[Flops, str]:
    """The floating-point operations of all calls of a step at logical size, and the dtype of most of them."""
    by_dtype: dict[str, int] = {}
    loop = graph.loop
    for call in graph.of_kind(Call):
        times = graph.micro_batches if any(v.name in loop for v in call.makes) else 1
        one = call.first
        try:
            work = times * flops(one)
        except RuleError:
            continue
        floats = (spec.dtype for spec in one.operands if "float" in spec.dtype)
        dtype = next(floats, "float32")
        by_dtype[dtype] = by_dtype.get(dtype, 0) + work
    most = max(by_dtype, key=lambda dtype: (by_dtype[dtype], dtype), default="float32")
    return Flops(sum(by_dtype.values())), most


def values_of(plan: RankPlan) -> dict[str, LocalValue]:
    """Every local value of a plan by name."""
    found = {item.value.name: item.value for item in plan.inputs}
    for actor in plan.actors:
        if isinstance(actor, Compute):
            found.update((value.name, value) for node in actor.nodes for value in node.makes)
        elif isinstance(actor, Communicate):
            found.update((v.name, v) for each in actor.collectives for v in each.makes)
    return found


# Transfers between placements with all that is sent, by the ranks that are planned and by those that they stand for.
#
# Of a transfer that is a step of a boxing the layouts say all. Of another one, such as that of border rows, it is
# known that ranks that are not planned send as much as the rank that stands for them, to ranks of the same classes:
# rank `k` of its class to the one that lies `k` places further in the peer's class. Which one it is, counts only
# where two of them use different links.


@final
class Transfers:
    """The costs of the transfers of a step."""

    def __init__(self, step: PlannedStep, costs: Costs) -> None:
        self._costs = costs
        self._ranks = {one.id: one.ranks for one in step.communicators}
        self._stands = step.classes
        self._members = step.members
        self._at: dict[tuple[str, int], list[tuple[int, Communicate]]] = {}
        self._place: dict[tuple[int, int], tuple[str, int]] = {}
        for plan in step.plans:
            for queue, own in plan.on_queue.items():
                for place, actor in enumerate(own):
                    if isinstance(actor, Communicate):
                        self._at.setdefault((queue, place), []).append((plan.rank, actor))
                        self._place[plan.rank, actor.id] = queue, place
        self._known: dict[tuple[str, int], Cost] = {}
        self._graph = step.graph
        self._pieces: dict[_Step, tuple[tuple[int, int, Bytes], ...]] = {}

    def cost(self, rank: int, actor: Communicate) -> Cost:
        """The cost of a transfer, the same on all its ranks."""
        where = self._place[rank, actor.id]
        if where not in self._known:
            sent = self._every(where)
            if sent is None:
                sent = {}
                for member, one in self._at[where]:
                    for _, source, target, size in self._alike(member, one):
                        sent[source, target] = max(sent.get((source, target), NO_BYTES), size)
            sides = Counter[tuple[str, int]]()
            for (source, target), size in sent.items():
                sides["sends", source] += size
                sides["receives", target] += size
            moved = Bytes(max(sides.values(), default=0))
            every = [(source, target, size) for (source, target), size in sorted(sent.items())]
            self._known[where] = self._costs.of_transfer(every, moved)
        return self._known[where]

    def pieces(self, rank: int, actor: Communicate) -> Iterator[tuple[int, int, int, Bytes]]:
        """The pieces that a rank, and those that it stands for, send and get: whose, from, to, bytes."""
        every = self._every(self._place[rank, actor.id])
        if every is None:
            yield from self._alike(rank, actor)
            return
        own = set(self._members.get(rank, (rank,)))
        for (source, target), size in every.items():
            for one in own.intersection((source, target)):
                yield one, source, target, size

    def _every(self, where: tuple[str, int]) -> dict[tuple[int, int], Bytes] | None:
        """All that is sent at a place of a queue, where the layouts say it; None elsewhere."""
        sent = dict[tuple[int, int], Bytes]()
        members, parts = zip(*self._at[where], strict=True)
        for joined in zip(*(one.collectives for one in parts), strict=True):
            ranks = tuple(self._ranks.get(joined[0].communicator, ()))
            step = next(
                (s for s in self._steps.get(ranks, ()) if all(map(s.has, joined, members))), None
            )
            if step is None:
                return None
            if step not in self._pieces:
                self._pieces[step] = tuple(whole_pieces(*step))
            for source, target, size in self._pieces[step]:
                sent[source, target] = Bytes(sent.get((source, target), 0) + size)
        return sent

    @cached_property
    def _steps(self) -> dict[tuple[int, ...], list[_Step]]:
        """The transfers of all boxings, by the ranks that they bring together."""
        graph, found = self._graph, dict[tuple[int, ...], list[_Step]]()
        boxings = dict.fromkeys(
            (value.layout, node.output.layout, value.shape, value.dtype)
            for node in graph.of_kind(Box)
            for value in (graph.values[node.input.name],)
        )
        for before, after, shape, dtype in boxings:
            for step in steps(before, after, shape, ITEM_SIZE[dtype]):
                if step.kind == "transfer":
                    found.setdefault(transfer_ranks(step), []).append(_Step(step, shape, dtype))
        return found

    def _alike(self, rank: int, actor: Communicate) -> Iterator[tuple[int, int, int, Bytes]]:
        """The pieces of a rank and of those that it stands for, as if these sent alike."""
        pairs: dict[tuple[int, int], int] = {}
        ranks: Sequence[int] = ()
        for each in actor.collectives:
            if isinstance(each, Transfer):
                ranks = self._ranks.get(each.communicator, ())
                for source, target, crosses in transfer_pieces(each, rank, self._ranks):
                    pairs[source, target] = pairs.get((source, target), 0) + crosses
        there = set(ranks)
        own = [one for one in self._members.get(rank, (rank,)) if one in there] or [rank]
        base = own.index(rank)
        for (source, target), size in pairs.items():
            other = target if source == rank else source
            peers = [
                one
                for one in self._members.get(self._stands.get(other, other), (other,))
                if one in there
            ]
            at = peers.index(other) if other in peers else 0
            peers = peers if other in peers else [other]
            for number, one in enumerate(own):
                peer = peers[(at + number - base) % len(peers)]
                ends = (one, peer) if source == rank else (peer, one)
                yield one, *ends, Bytes(size)


@final
class _Step(NamedTuple):
    step: BoxingStep
    shape: tuple[int, ...]
    dtype: str

    def has(self, node: Exchange, rank: int) -> bool:
        """True if a node is a rank's part in this step."""
        if not isinstance(node, Transfer):
            return False
        value = node.input if node.input is not None else node.output
        if value is None or value.dtype != self.dtype:
            return False
        part = local_transfer(self.step, self.shape, rank)
        return (part.sends, part.receives) == (node.sends, node.receives)


def whole_pieces(
    step: BoxingStep, shape: tuple[int, ...], dtype: str
) -> Iterator[tuple[int, int, Bytes]]:
    """The messages of a transfer of a whole tensor: from, to, bytes."""
    ranks = transfer_ranks(step)
    every = routes(*numbered_layouts(step.source, step.target), shape)
    for place in range(len(step.source.placement.ranks)):
        for peer, region in every.sends(place):
            if peer != place:
                yield ranks[place], ranks[peer], Bytes(region_size(region) * ITEM_SIZE[dtype])
