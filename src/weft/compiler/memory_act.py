"""What one act takes beside what it reads: temporaries that are freed after their last use, and what it leaves.

The walks follow `runtime/kernels.py`, `runtime/optimizer.py` and `runtime/collectives.py`.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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
class ActMemory:
    """What an act does to memory.

    Attributes:
        extra: the most that it takes beside what it reads and `kept`, by kind.
        fresh: the storages that it leaves: kind and bytes, by the name that they were made for.
        bases: for each register that it fills: a name in `fresh`, or what it reads and looks at.
        kept: those in `fresh` that are there from its first act of a step: what adds up over
            micro-batches.
    """

    extra: Counter[Kind] = field(default_factory=Counter)
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

    def kind(name: str) -> Kind:
        return "gradients" if name in marked else registers.get(name, "activations")

    produced = {name: bases.get(name, name) for name in actor.produces if name in made}
    read = {bases.get(update.source, update.source) for update in updates}
    lasting = {*produced.values(), *read}
    extra = _most([call for call in calls if call.op not in LASTING_OPS], bases, lasting, kind)
    fresh = {
        base: (kind(base), value_bytes(made[base])) for base in produced.values() if base in made
    }
    return ActMemory(extra, fresh, produced, frozenset(kept))


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


def _most(
    calls: Sequence[LocalCall], bases: Mapping[str, str], lasting: Collection[str], kind: KindOf
) -> Counter[Kind]:
    """The most that a run of calls takes at a time."""
    last = {
        bases.get(name, name): place
        for place, call in enumerate(calls)
        for name in (*call.reads, *(value.name for value in call.makes))
    }
    ending: dict[int, list[str]] = {}
    for name, place in last.items():
        if name not in lasting:
            ending.setdefault(place, []).append(name)
    live: dict[str, int] = {}
    now, most = Counter[Kind](), Counter[Kind]()
    for place, call in enumerate(calls):
        for value in call.makes:
            if value.name not in bases:
                live[value.name] = value_bytes(value)
                now[kind(value.name)] += live[value.name]
        if now.total() > most.total():
            most = now.copy()
        for name in ending.get(place, ()):
            now[kind(name)] -= live.pop(name, 0)
    return most


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
    extra: Counter[Kind] = Counter()
    extra["communication"] = sum(map(exchange_bytes, actor.collectives))
    return ActMemory(extra, fresh, bases)


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
