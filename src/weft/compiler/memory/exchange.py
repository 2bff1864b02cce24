"""The memory that collectives and transfers take while they run, as `runtime/channels/collectives.py` runs them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from functools import partial
from typing import TypeGuard

from weft.boxing.overlaps import slices_of
from weft.compiler.memory.kinds import ActMemory, Taken
from weft.ir.plan import Collective, Communicate, Exchange, LocalValue, Transfer
from weft.ir.queries.alias import Kind, value_bytes
from weft.layout import Region
from weft.units import ITEM_SIZE, Bytes


def communicate(
    actor: Communicate, sources: Collection[str], strided: Collection[str] = ()
) -> ActMemory:
    """The memory that an act of a communicating actor takes and leaves.

    Args:
        actor: what runs.
        sources: names of what optimizers read.
        strided: names of values that may lie out of order, and are copied before they are sent.
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
            fresh[value.name] = (kind, value_bytes(value))
    copying = [
        (each, _laid(each, strided))
        for each in actor.collectives
        if not _in_place(each) or each.input.name in strided
    ]
    return ActMemory(partial(_exchanged, copying), fresh=fresh, bases=bases)


def _laid(each: Exchange, strided: Collection[str]) -> Bytes:
    """The bytes of a copy of the input that lies in order, where none is made anyway."""
    if each.input is None or each.input.name not in strided:
        return Bytes(0)
    if isinstance(each, Collective):
        in_pieces = (
            each.kind == "all_reduce"
            or (each.kind == "all_to_all" and each.split_dim)
            or (each.kind == "reduce_scatter" and (each.dim or slices_of(each)))
        )
        return Bytes(0) if in_pieces else value_bytes(each.input)
    size = sum(math.prod(length for _, length in region) for _, region in each.sends)
    return Bytes(size * ITEM_SIZE[each.input.dtype])


def _in_place(each: Exchange) -> TypeGuard[Collective]:
    """True where an exchange writes its result over its input."""
    return isinstance(each, Collective) and each.in_place


def _exchanged(
    collectives: Sequence[tuple[Exchange, Bytes]], taken: Collection[Taken]
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
        return _transfer_bytes(each)
    before, after = value_bytes(each.input), value_bytes(each.output)
    others = after - (before if each.kind == "all_gather" else 0)
    match each.kind:
        case "all_reduce":
            return after  # a copy of the input, reduced where it lies
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


def _transfer_bytes(each: Transfer) -> Bytes:
    size = 0
    if each.output is not None:
        size += value_bytes(each.output)
        size += sum(_copied(each.output, region) for _, region in each.receives)
    if each.input is not None:
        size += sum(_copied(each.input, region) for _, region in each.sends)
    return Bytes(size)


def _copied(value: LocalValue, region: Region) -> Bytes:
    """The bytes of a piece that is not contiguous in a tensor, and so gets a buffer of its own."""
    lengths = [length for _, length in region]
    cut = [dim for dim, length in enumerate(lengths) if length < value.shape[dim]]
    if not cut or math.prod(lengths[: cut[-1]]) <= 1:
        return Bytes(0)
    return Bytes(math.prod(lengths) * ITEM_SIZE[value.dtype])
