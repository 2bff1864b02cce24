"""What collectives and transfers take while they run, as `runtime/collectives.py` runs them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import TypeGuard

from weft.compiler.memory_kinds import ActMemory, Kind, Taken, value_bytes
from weft.ir.plan import Collective, Communicate, Exchange, LocalValue, Transfer
from weft.layout import Region
from weft.units import ITEM_SIZE


def communicate(actor: Communicate, sources: Collection[str]) -> ActMemory:
    """What an act of a communicating actor takes and leaves; all-reduces of one bucket share what they leave."""
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
