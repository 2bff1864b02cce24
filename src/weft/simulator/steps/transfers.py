"""Transfers between placements with all that is sent, by the ranks that are planned and by those that they stand for.

Of a transfer that is a step of a boxing the layouts say all. Of another one, such as that of border rows, it is
known that ranks that are not planned send as much as the rank that stands for them, to ranks of the same classes:
rank `k` of its class to the one that lies `k` places further in the peer's class. Which one it is, counts only
where two of them use different links.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, final

from weft.boxing import BoxingStep, steps
from weft.boxing.routes import numbered_layouts, routes
from weft.boxing.transfer import local_transfer, transfer_ranks
from weft.cached import cached_property
from weft.hardware.costs import Cost, Costs
from weft.hardware.durations import transfer_pieces
from weft.ir.logical import Box
from weft.ir.plan import Communicate, Exchange, Transfer
from weft.layout import region_size
from weft.simulator.steps.planned import PlannedStep
from weft.units import ITEM_SIZE, NO_BYTES, Bytes


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
            moved = _most(sent)
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


def _most(sent: Mapping[tuple[int, int], Bytes]) -> Bytes:
    """The most that a rank sends or receives."""
    sides: dict[tuple[bool, int], int] = {}
    for (source, target), size in sent.items():
        for key in ((True, source), (False, target)):
            sides[key] = sides.get(key, 0) + size
    return Bytes(max(sides.values(), default=0))


@final
class _Step(NamedTuple):
    step: BoxingStep
    shape: tuple[int, ...]
    dtype: str

    def has(self, node: Exchange, rank: int) -> bool:
        """True where a node is a rank's part in this step."""
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
    """All that a transfer of a whole tensor sends: from, to, bytes."""
    ranks = transfer_ranks(step)
    every = routes(*numbered_layouts(step.source, step.target), shape)
    for place in range(len(step.source.placement.ranks)):
        for peer, region in every.sends(place):
            if peer != place:
                yield ranks[place], ranks[peer], Bytes(region_size(region) * ITEM_SIZE[dtype])
