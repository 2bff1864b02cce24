"""The memory that one act takes beside its inputs: temporaries that are freed after their last use, and its results.

The walk follows `runtime/kernels/generated.py` and `runtime/executor/optimizer.py`.

Collectives and transfers take what `runtime/channels/collectives.py` takes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TypeAlias, TypeGuard, final

from weft.boxing.overlaps import slices_of
from weft.cached import cached_property
from weft.compiler.memory.strides import merges
from weft.compiler.plans.specialize import join_sums
from weft.ir.alias import KINDS, Kind, overwritten, view_bases, with_overwrites
from weft.ir.logical import OVER_STEP
from weft.ir.nodes import NO_UPDATE_BYTES
from weft.ir.plan import (
    Actor,
    Collective,
    Communicate,
    Compute,
    Exchange,
    LocalCall,
    LocalUpdate,
    LocalValue,
    Register,
    Transfer,
)
from weft.layout import Region
from weft.ops import OpCall
from weft.ops.call import normal_dim
from weft.ops.kernel_memory import FEW, LAYING, TAKING, beside, padding, slice_copies
from weft.units import ITEM_SIZE, NO_BYTES, Bytes

KindOf: TypeAlias = Callable[[str], Kind]


def gradient_sources(actors: Iterable[Actor]) -> frozenset[str]:
    """The names of the values that optimizers read."""
    return frozenset(
        node.source
        for actor in actors
        if isinstance(actor, Compute)
        for node in actor.nodes
        if isinstance(node, LocalUpdate) and node.rule != "copy"
    )


def act_memory(
    actor: Actor,
    sources: Collection[str],
    registers: Mapping[str, Register],
    strided: Collection[str] = (),
) -> ActMemory:
    """The memory that an act of `actor` takes.

    Args:
        sources: names of what optimizers read.
        strided: names of values that may be laid out of order.
    """
    match actor:
        case Compute():
            return _compute(actor, sources, registers, strided)
        case Communicate():
            return communication_memory(actor, sources, strided)
        case _:
            return ActMemory()


def _compute(
    actor: Compute,
    sources: Collection[str],
    registers: Mapping[str, Register],
    strided: Collection[str],
) -> ActMemory:
    nodes = join_sums(actor.nodes, actor.produces)[0] if actor.acts > 1 else actor.nodes
    calls = [node for node in nodes if isinstance(node, LocalCall)]
    updates = [node for node in nodes if isinstance(node, LocalUpdate)]
    made = {value.name: value for call in calls for value in call.makes}
    read = {name for call in calls for name in call.reads if name in registers}
    values = made | {name: registers[name].value for name in read}
    bases, shared = _shares(calls, values, strided)
    leaving = {*actor.produces, *(update.source for update in updates)}
    over = overwritten(calls, leaving)
    bases, shared = (with_overwrites(each, calls, over) for each in (bases, shared))
    kept = _made_by(calls, OVER_STEP)
    marked = {bases.get(name, name) for name in made if name in sources}
    kind = _kinds(marked, _made_by(calls, ("weft.offload",)), registers)
    produced = {name: bases.get(name, name) for name in actor.produces if name in made}
    updated = {bases.get(update.source, update.source) for update in updates}
    lasting = frozenset((*produced.values(), *updated))
    taking = {place: c.first for place, c in enumerate(calls) if c.op in TAKING}
    sizes = _sizes(calls, made, taking)
    besides = _besides(calls, values, taking, strided)
    most, together = Counter[object](), Counter[object]()
    before: dict[object, tuple[int, int]] = {}
    for update in sorted(updates, key=lambda update: update.group):
        copied = update.source in strided and update.rule != "copy"
        if copied or update.takes != NO_UPDATE_BYTES:
            run, target = (update.rule, update.skip), registers[update.target].value
            elements, takes = prod(target.shape), update.takes
            together[run] += takes.together * elements + (target.nbytes if copied else 0)
            # While one begins, tensors of the last one are there; they go as those of its own come.
            alone = takes.alone * elements + FEW if takes.alone else 0
            left = takes.left * elements
            last, its_left = before.get(run, (0, 0))
            most[run] = max(most[run], max(alone, last) + min(left, its_left))
            before[run] = alone, left
    taken = Bytes(max((most[run] + together[run] for run in most), default=0))
    walk = _Segment(calls, bases, shared, lasting, kept, kind, sizes, besides, taken)
    fresh = {base: (kind(base), sizes[base]) for base in produced.values() if base in made}
    # A result that may be a view or a copy takes its own memory, and keeps its operand alive.
    under = {base: shared[base] for base in fresh if base in shared}
    fresh |= {root: (kind(root), sizes[root]) for root in under.values() if root in made}
    return ActMemory(walk.most, walk.live, fresh, produced, kept, under)


def _made_by(calls: Iterable[LocalCall], ops: Collection[str]) -> frozenset[str]:
    return frozenset(value.name for call in calls if call.op in ops for value in call.makes)


def _shares(
    calls: Sequence[LocalCall], values: Mapping[str, LocalValue], strided: Collection[str]
) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """For each view, the value whose memory it shares; then the same, and for what may be a view or a copy."""
    sharing, sure = list[LocalCall](), list[LocalCall]()
    for call in calls:
        slices, copies, joins = call.op == "weft.slice", False, False
        if slices or call.op == "aten.reshape.default":
            first, (made,) = values[call.operands[0]], call.makes
            # What is out of order is copied where a slice is taken of it, or its dimensions are joined.
            joins = first.name in strided and (slices or merges(first.shape, made.shape))
            if slices:
                dim = normal_dim(int(call.args[1]), len(first.shape))  # type: ignore[arg-type]
                copies = slice_copies(first.shape, dim, made.shape[dim])
        # Of ranks that keep none the value is neutral.
        if not copies and not (call.op == "weft.keep" and call.args[1] is False):
            sharing.append(call)
            sure += [] if joins else [call]
    shared = view_bases(sharing)
    return shared if len(sure) == len(sharing) else view_bases(sure), shared


def _kinds(
    marked: Collection[str], away: Collection[str], registers: Mapping[str, Register]
) -> KindOf:
    """The kind of each value: gradients are `marked`, what is on the host is `away`."""

    def kind(name: str) -> Kind:
        if name in marked:
            return "gradients"
        if name in away:
            return "host"
        return KINDS[registers[name].kind] if name in registers else "activations"

    return kind


def _sizes(
    calls: Sequence[LocalCall], made: Mapping[str, LocalValue], taking: Mapping[int, OpCall]
) -> dict[str, Bytes]:
    """The bytes of each result, with what its kernel makes around it; `taking` are calls that take more, by place."""
    found = {name: value.nbytes for name, value in made.items()}
    for place, call in taking.items():
        for value, more in zip(calls[place].outputs, padding(call), strict=True):
            if value is not None:
                found[value.name] = Bytes(found[value.name] + more)
    return found


def _besides(
    calls: Sequence[LocalCall],
    values: Mapping[str, LocalValue],
    taking: Mapping[int, OpCall],
    strided: Collection[str],
) -> dict[int, Bytes]:
    """The bytes that calls take beside their results while they run, by place: of kernels, of operands put in order."""
    found = {place: beside(call) for place, call in taking.items()}
    for place, each in enumerate(calls):
        if each.op in LAYING:
            copied = sum(values[x].nbytes for x in each.operands if x in strided)
            found[place] = Bytes(found.get(place, 0) + copied)
    return found


@final
@dataclass(frozen=True)
class _Segment:
    """A run of calls.

    Attributes:
        bases: for each view, the value whose memory it shares.
        shared: the same, and for what may be a view.
        lasting: what stays until the end: results, and what updates read.
        kept: values that existed before; they do not count.
        sizes: bytes of the memory of what calls make.
        besides: bytes that calls take beside it while they run, by their places.
        updating: bytes that the updates after the calls take.
    """

    calls: Sequence[LocalCall]
    bases: Mapping[str, str]
    shared: Mapping[str, str]
    lasting: frozenset[str]
    kept: frozenset[str]
    kind: KindOf
    sizes: Mapping[str, Bytes]
    besides: Mapping[int, Bytes]
    updating: Bytes

    @cached_property
    def last(self) -> dict[str, int]:
        """For every value that is not a view, the place of the last call that may use its memory."""
        return {
            base: place
            for place, call in enumerate(self.calls)
            for name in (*call.reads, *(value.name for value in call.makes))
            for base in (self.bases.get(name, name), self.shared.get(name, name))
        }

    def most(self, taken: Collection[OwnedStorage]) -> Counter[Kind]:
        """The most that the calls take at a time; values are freed after their last use."""
        return self._highest(taken)[0]

    def live(self, taken: Collection[OwnedStorage]) -> dict[str, Bytes]:
        """The values, with their bytes, that calls have made and that are there when they take most."""
        highest = self._highest(taken)[1]
        return {
            value.name: self.sizes[value.name]
            for call in self.calls[: highest + 1]
            for value in call.makes
            if value.name not in self.bases
            and (value.name in self.lasting or self.last[value.name] >= highest)
        }

    def _highest(self, taken: Collection[OwnedStorage]) -> tuple[Counter[Kind], int]:
        """The memory that is taken when it is most, and the place of the call that runs then."""
        ending: dict[int, list[tuple[Kind, Bytes]]] = {}
        for each in taken:
            # Host memory does not count, so its end frees nothing.
            if each.kind != "host" and self.lasting.isdisjoint(each.names):
                place = max((self.last.get(name, 0) for name in each.names), default=0)
                ending.setdefault(place, []).append((each.kind, each.bytes))
        now, most, total, highest, where = Counter[Kind](), Counter[Kind](), 0, 0, -1
        for place, call in enumerate(self.calls):
            for value in call.makes:
                kind, size = self.kind(value.name), self.sizes[value.name]
                if value.name in self.bases or value.name in self.kept or kind == "host":
                    continue
                now[kind] += size
                total += size
                if value.name not in self.lasting:
                    ending.setdefault(self.last[value.name], []).append((kind, size))
            more = self.besides.get(place, NO_BYTES)
            if total + more > highest:
                most, highest, where = now.copy(), total + more, place
                most["activations"] += more
            for kind, size in ending.get(place, ()):
                now[kind] -= size
                total -= size
        if total + self.updating > highest:
            most, where = now, len(self.calls)
            most["activations"] += self.updating
        return most, where


def communication_memory(
    actor: Communicate, sources: Collection[str], strided: Collection[str] = ()
) -> ActMemory:
    """The memory that an act of a communicating actor takes and leaves.

    Args:
        strided: names of values that may be laid out of order, and are copied before they are sent.
    """
    bases: dict[str, str] = {}
    fresh: dict[str, tuple[Kind, Bytes]] = {}
    for each in actor.collectives:
        for value in each.makes:
            if _in_place(each):
                bases[value.name] = each.input.name
                continue
            bases[value.name] = value.name
            kind: Kind = "gradients" if value.name in sources else "communication"
            fresh[value.name] = (kind, value.nbytes)
    copying = [
        (each, _laid(each, strided))
        for each in actor.collectives
        if not _in_place(each) or each.input.name in strided
    ]
    return ActMemory(partial(_exchanged, copying), fresh=fresh, bases=bases)


def _laid(each: Exchange, strided: Collection[str]) -> Bytes:
    """The bytes of a copy of the input that is laid out in order, where none is made anyway."""
    if each.input is None or each.input.name not in strided:
        return Bytes(0)
    if isinstance(each, Collective):
        in_pieces = (
            each.kind == "all_reduce"
            or (each.kind == "all_to_all" and each.split_dim)
            or (each.kind == "reduce_scatter" and (each.dim or slices_of(each)))
        )
        return Bytes(0) if in_pieces else each.input.nbytes
    size = sum(math.prod(length for _, length in region) for _, region in each.sends)
    return Bytes(size * ITEM_SIZE[each.input.dtype])


def _in_place(each: Exchange) -> TypeGuard[Collective]:
    """True if an exchange writes its result over its input."""
    return isinstance(each, Collective) and each.in_place


def _exchanged(
    collectives: Sequence[tuple[Exchange, Bytes]], taken: Collection[OwnedStorage]
) -> Counter[Kind]:
    """The memory that exchanges take. An input of an all-reduce goes once there is a copy of it."""
    most, now = Counter[Kind](), Counter[Kind]()
    waiting = {name: each for each in taken for name in each.names}
    for each, laid in collectives:
        now["communication"] += exchange_bytes(each) + laid
        if now.total() > most.total():
            most = now.copy()
        if isinstance(each, Collective) and each.kind == "all_reduce":
            gone = waiting.pop(each.input.name, None)
            if gone is not None and gone not in waiting.values():
                now[gone.kind] -= gone.bytes
    return most


def exchange_bytes(each: Exchange) -> Bytes:
    """The most that an exchange takes, its output included, as `runtime/channels/collectives.py` runs it."""
    if isinstance(each, Transfer):
        size = 0
        if each.output is not None:
            size += each.output.nbytes
            size += sum(_copied(each.output, region) for _, region in each.receives)
        if each.input is not None:
            size += sum(_copied(each.input, region) for _, region in each.sends)
        return Bytes(size)
    before, after = each.input.nbytes, each.output.nbytes
    others = after - (before if each.kind == "all_gather" else 0)
    match each.kind:
        case "all_reduce":
            return after  # a copy of the input, reduced where it is
        case "all_gather":
            return Bytes(after + (others if each.dim else 0))
        case "all_to_all":
            pieces = before if each.split_dim else 0
            # Joined along another dimension than the first, those of the others arrive in buffers.
            own = after * each.input.shape[each.dim] // max(1, each.output.shape[each.dim])
            return Bytes(pieces + after + (after - own if each.dim else 0))
        case "reduce_scatter" if slices := slices_of(each):
            return Bytes(after + 2 * slices.bytes)  # those that go, and those that come
        case "reduce_scatter":
            # Pieces that are not contiguous are copied; one arrives from each of the others.
            return Bytes((before if each.dim else 0) + after * max(1, len(each.sizes) - 1))


def _copied(value: LocalValue, region: Region) -> Bytes:
    lengths = [length for _, length in region]
    cut = [dim for dim, length in enumerate(lengths) if length < value.shape[dim]]
    if not cut or math.prod(lengths[: cut[-1]]) <= 1:
        return Bytes(0)
    return Bytes(math.prod(lengths) * ITEM_SIZE[value.dtype])


@final
@dataclass(frozen=True, slots=True)
class OwnedStorage:
    """A storage that nobody but the act holds: the names under which it reads it, kind and bytes."""

    names: frozenset[str]
    kind: Kind
    bytes: Bytes


# The most that an act takes beside what it reads and keeps, by kind, given what it may free on the
# way.
Extra: TypeAlias = Callable[[Collection[OwnedStorage]], Counter[Kind]]


@final
@dataclass(frozen=True, slots=True)
class ActMemory:
    """The effect of an act on memory.

    Attributes:
        extra: what it takes beside what it reads and `kept`.
        live: the values that it has made when it takes most, with their bytes, given what it may
            free.
        fresh: the storages that it leaves: kind and bytes, by the name that they were made for.
        bases: for each register that it fills: a name in `fresh`, or what it reads and looks at.
        kept: those in `fresh` that are there from its first act of a step: what adds up over
            micro-batches.
        under: for those in `fresh` that may be copies or views, the possible base, which lives as long as they do.
    """

    extra: Extra = lambda taken: Counter()
    live: Callable[[Collection[OwnedStorage]], Mapping[str, Bytes]] = lambda taken: {}
    fresh: Mapping[str, tuple[Kind, Bytes]] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()
    under: Mapping[str, str] = field(default_factory=dict)
