"""What one act takes beside what it reads: temporaries that are freed after their last use, and what it leaves.

The walks follow `runtime/kernels.py`, `runtime/optimizer.py` and `runtime/collectives.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import TypeAlias, TypeGuard

from weft.compiler.aliases import VIEW_OPS
from weft.compiler.memory_kinds import Kind, value_bytes
from weft.ir.logical import refs
from weft.ir.plan import (
    Actor,
    Collective,
    Communicate,
    Compute,
    Exchange,
    LocalCall,
    LocalUpdate,
    LocalValue,
    Transfer,
)
from weft.layout import Region
from weft.units import ITEM_SIZE

KindOf: TypeAlias = Callable[[str], Kind]


@dataclass(frozen=True, slots=True)
class Taken:
    """A storage that nobody but the act holds: the names under which it reads it, kind and bytes."""

    names: frozenset[str]
    kind: Kind
    bytes: int


# The most that an act takes beside what it reads and keeps, by kind, given what it may free on the
# way.
Extra: TypeAlias = Callable[[Collection[Taken]], Counter[Kind]]


@dataclass(frozen=True, slots=True)
class ActMemory:
    """What an act does to memory.

    Attributes:
        extra: what it takes beside what it reads and `kept`.
        live: the values that it has made when it takes most, with their bytes, given what it may
            free.
        fresh: the storages that it leaves: kind and bytes, by the name that they were made for.
        bases: for each register that it fills: a name in `fresh`, or what it reads and looks at.
        kept: those in `fresh` that are there from its first act of a step: what adds up over
            micro-batches.
    """

    extra: Extra = lambda taken: Counter()
    live: Callable[[Collection[Taken]], Mapping[str, int]] = lambda taken: {}
    fresh: Mapping[str, tuple[Kind, int]] = field(default_factory=dict)
    bases: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[str] = frozenset()


# Ops that add up over micro-batches in a storage of their own.
LASTING_OPS = ("weft.accumulate", "weft.pack")


def gradient_sources(actors: Iterable[Actor]) -> frozenset[str]:
    """The names of what optimizers read."""
    return frozenset(
        node.source
        for actor in actors
        if isinstance(actor, Compute)
        for node in actor.nodes
        if isinstance(node, LocalUpdate) and node.rule != "copy"
    )


def act_memory(actor: Actor, sources: Collection[str], registers: Mapping[str, Kind]) -> ActMemory:
    """What an act of `actor` takes.

    Args:
        actor: any; those of the host take nothing.
        sources: names of what optimizers read.
        registers: the kind of every register.
    """
    match actor:
        case Compute():
            return _compute(actor, sources, registers)
        case Communicate():
            return _communicate(actor, sources)
        case _:
            return ActMemory()


def _compute(actor: Compute, sources: Collection[str], registers: Mapping[str, Kind]) -> ActMemory:
    calls = [node for node in actor.nodes if isinstance(node, LocalCall)]
    updates = [node for node in actor.nodes if isinstance(node, LocalUpdate)]
    bases = view_bases(calls)
    made = {value.name: value for call in calls for value in call.makes}
    kept = {v.name for call in calls if call.op in LASTING_OPS for v in call.makes}
    marked = {bases.get(name, name) for name in made if name in sources}
    away = {value.name for call in calls if call.op == "weft.offload" for value in call.makes}

    def kind(name: str) -> Kind:
        if name in marked or name in away:
            return "gradients" if name in marked else "host"
        return registers.get(name, "activations")

    produced = {name: bases.get(name, name) for name in actor.produces if name in made}
    read = {bases.get(update.source, update.source) for update in updates}
    lasting = {*produced.values(), *read}
    walk = _Segment(calls, bases, frozenset(lasting), frozenset(kept), kind)
    fresh = {
        base: (kind(base), value_bytes(made[base])) for base in produced.values() if base in made
    }
    return ActMemory(walk.most, walk.live, fresh, produced, frozenset(kept))


def view_bases(calls: Iterable[LocalCall]) -> dict[str, str]:
    """For each view that calls make, the value whose memory it shares."""
    bases: dict[str, str] = {}
    for call in calls:
        first = next(refs(call.args), None)
        if call.op in VIEW_OPS and first is not None and not _is_blank(call):
            base = bases.get(first, first)
            bases.update((value.name, base) for value in call.makes)
    return bases


def _is_blank(call: LocalCall) -> bool:
    """Whether a rank that does not keep a value makes a neutral one in its place."""
    return call.op == "weft.keep" and call.args[1] is False


@dataclass(frozen=True)
class _Segment:
    """A run of calls.

    Attributes:
        calls: in their order.
        bases: for each view, the value whose memory it shares.
        lasting: what stays until the end: results, and what updates read.
        kept: what was there before; it does not count.
        kind: of every value.
    """

    calls: Sequence[LocalCall]
    bases: Mapping[str, str]
    lasting: frozenset[str]
    kept: frozenset[str]
    kind: KindOf

    @cached_property
    def last(self) -> dict[str, int]:
        """For every value that is no view, the place of the last call that uses its memory."""
        return {
            self.bases.get(name, name): place
            for place, call in enumerate(self.calls)
            for name in (*call.reads, *(value.name for value in call.makes))
        }

    def most(self, taken: Collection[Taken]) -> Counter[Kind]:
        """The most that the calls take at a time; values are freed after their last use."""
        return self._highest(taken)[0]

    def live(self, taken: Collection[Taken]) -> dict[str, int]:
        """The values, with their bytes, that calls have made and that are there when they take most."""
        highest = self._highest(taken)[1]
        return {
            value.name: value_bytes(value)
            for call in self.calls[: highest + 1]
            for value in call.makes
            if value.name not in self.bases
            and (value.name in self.lasting or self.last[value.name] >= highest)
        }

    def _highest(self, taken: Collection[Taken]) -> tuple[Counter[Kind], int]:
        """What is taken when it is most, and the place of the call that runs then."""
        ending: dict[int, list[tuple[Kind, int]]] = {}
        for each in taken:
            if self.lasting.isdisjoint(each.names):
                place = max((self.last.get(name, 0) for name in each.names), default=0)
                ending.setdefault(place, []).append((each.kind, each.bytes))
        now, most, total, highest, where = Counter[Kind](), Counter[Kind](), 0, 0, -1
        size: int
        for place, call in enumerate(self.calls):
            for value in call.makes:
                kind, size = self.kind(value.name), value_bytes(value)
                if value.name in self.bases or value.name in self.kept or kind == "host":
                    continue
                now[kind] += size
                total += size
                if value.name not in self.lasting:
                    ending.setdefault(self.last[value.name], []).append((kind, size))
            if total > highest:
                most, highest, where = now.copy(), total, place
            for kind, size in ending.get(place, ()):
                now[kind] -= size
                total -= size
        return most, where


def _communicate(actor: Communicate, sources: Collection[str]) -> ActMemory:
    joined = [each for each in actor.collectives if _joins(each)]
    whole = joined[0].output.name if len(joined) > 1 else ""
    bases = {
        value.name: whole if whole and _joins(each) else value.name
        for each in actor.collectives
        for value in each.makes
    }
    fresh: dict[str, tuple[Kind, int]] = {}
    for each in actor.collectives:
        for value in each.makes:
            base = bases[value.name]
            kind, size = fresh.get(base, ("communication", 0))
            gradient = value.name in sources
            fresh[base] = ("gradients" if gradient else kind, size + value_bytes(value))
    return ActMemory(partial(_exchanged, actor.collectives), fresh=fresh, bases=bases)


def _exchanged(collectives: Sequence[Exchange], taken: Collection[Taken]) -> Counter[Kind]:
    """What exchanges take. Inputs of all-reduces are freed once there is a copy of them."""
    whole: Counter[Kind] = Counter()
    whole["communication"] = sum(map(exchange_bytes, collectives))
    if not all(map(_joins, collectives)):
        return whole
    copied = Counter(whole)
    copied["communication"] //= 2
    for each in taken:
        whole[each.kind] -= each.bytes
    return max(whole, copied, key=Counter.total)


def _joins(each: Exchange) -> TypeGuard[Collective]:
    return isinstance(each, Collective) and each.kind == "all_reduce"


def exchange_bytes(each: Exchange) -> int:
    """The most that an exchange takes, its output included, as `runtime/collectives.py` runs it."""
    if isinstance(each, Transfer):
        return _transfer_bytes(each)
    before, after = value_bytes(each.input), value_bytes(each.output)
    others = after - (before if each.kind == "all_gather" else 0)
    match each.kind:
        case "all_reduce":
            # The sum of what the ranks send is written over what arrives.
            return 2 * after
        case "all_gather":
            return after + (others if each.dim else 0)
        case "all_to_all":
            pieces = before if each.split_dim else 0
            return pieces + after * (2 if each.dim else 1)
        case "reduce_scatter":
            # Pieces that are not contiguous are copied; one arrives from each of the others.
            return (before if each.dim else 0) + after * max(1, len(each.sizes) - 1)


def _transfer_bytes(each: Transfer) -> int:
    size = 0
    if each.output is not None:
        size += value_bytes(each.output)
        size += sum(_copied(each.output, region) for _, region in each.receives)
    if each.input is not None:
        size += sum(_copied(each.input, region) for _, region in each.sends)
    return size


def _copied(value: LocalValue, region: Region) -> int:
    """The bytes of a piece that is not contiguous in a tensor, and so gets a buffer of its own."""
    lengths = [length for _, length in region]
    cut = [dim for dim, length in enumerate(lengths) if length < value.shape[dim]]
    if not cut or math.prod(lengths[: cut[-1]]) <= 1:
        return 0
    return math.prod(lengths) * ITEM_SIZE[value.dtype]
