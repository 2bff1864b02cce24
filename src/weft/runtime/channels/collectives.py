"""The collectives of a plan, made of a channel's primitives: uneven pieces, any dimension, any dtype."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.boxing.overlaps import Slices, slices_of
from weft.errors import InternalError
from weft.ir.plan import Collective, CollectiveKind, Transfer
from weft.layout import Region
from weft.runtime.channels.channel import Channel
from weft.runtime.memory.state import region_part


def run_collectives(
    channel: Channel,
    collectives: Sequence[Collective],
    inputs: list[Tensor],
) -> tuple[Tensor, ...]:
    """Run the collectives of one actor, joined into one message where the kind allows.

    Args:
        inputs: their local inputs, in any memory format; the list may be emptied, to free them
            early.

    Returns:
        Contiguous local outputs, fresh or what was reduced in place, never other aliases of the inputs.
    """
    kind = collectives[0].kind
    if kind == "all_reduce":
        return _all_reduce(channel, collectives, inputs)
    if channel.size == 1:
        return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in inputs)
    with channel.counting(kind):
        return _RUNNERS[kind](channel, collectives, inputs)


def run_transfer(channel: Channel, transfer: Transfer, tensor: Tensor | None) -> Tensor | None:
    """Exchange the pieces of a transfer."""
    output, made = None, transfer.output
    if made is not None:
        output = torch.empty(made.shape, dtype=getattr(torch, made.dtype), device=channel.device)
    sends: list[list[Tensor]] = [[] for _ in channel.ranks]
    for peer, region in transfer.sends:
        sends[peer].append(part_of(tensor, region).contiguous())
    parts = {peer: part_of(output, region) for peer, region in transfer.receives}
    # Pieces of the output itself where they can be received there.
    buffers = {
        peer: part if part.is_contiguous() else torch.empty_like(part).contiguous()
        for peer, part in parts.items()
    }
    receives = [[buffers[peer]] if peer in buffers else [] for peer in range(channel.size)]
    with channel.counting(transfer.kind):
        channel.exchange(sends, receives)
    for peer, part in parts.items():
        source = sends[peer][0] if peer == channel.index else buffers[peer]
        if source is not part:
            part.copy_(source)
    return output


def part_of(tensor: Tensor | None, region: Region) -> Tensor:
    """A view of a region of a tensor."""
    if tensor is None:
        raise InternalError("a transfer takes a piece of a tensor that this rank does not hold")
    return region_part(tensor, region)


def _all_reduce(
    channel: Channel,
    collectives: Sequence[Collective],
    inputs: list[Tensor],
) -> tuple[Tensor, ...]:
    """Reduce the inputs where they are, or copies of them; those of one dtype and reduction in one message."""
    inputs.reverse()
    outputs = []
    for each in collectives:
        own = inputs.pop()
        if not each.in_place or not own.is_contiguous():
            own = own.clone(memory_format=torch.contiguous_format)
        outputs.append(own)
    for (_, reduction), numbers in _alike(collectives).items():
        channel.all_reduce([outputs[number] for number in numbers], reduction)
    return tuple(outputs)


def _alike(collectives: Sequence[Collective]) -> dict[tuple[str, str], list[int]]:
    members: dict[tuple[str, str], list[int]] = {}
    for number, each in enumerate(collectives):
        members.setdefault((each.input.dtype, each.reduction), []).append(number)
    return members


def _all_gather(
    channel: Channel, collectives: Sequence[Collective], inputs: list[Tensor]
) -> tuple[Tensor, ...]:
    pieces = [[tensor.contiguous()] * channel.size for tensor in inputs]
    return _exchange(channel, collectives, pieces)


def _all_to_all(
    channel: Channel, collectives: Sequence[Collective], inputs: list[Tensor]
) -> tuple[Tensor, ...]:
    pieces = [
        [
            piece.contiguous()
            for piece in tensor.split_with_sizes(collective.split_sizes, collective.split_dim)
        ]
        for collective, tensor in zip(collectives, inputs, strict=True)
    ]
    return _exchange(channel, collectives, pieces)


def _exchange(
    channel: Channel, collectives: Sequence[Collective], pieces: Sequence[Sequence[Tensor]]
) -> tuple[Tensor, ...]:
    """Send `pieces[i][peer]` for every collective `i` and concatenate what arrives along its `dim`."""
    buffers = []
    for collective, own in zip(collectives, pieces, strict=True):
        buffers.append(_buffers(collective, own[channel.index], channel.index))
    sends = [[own[peer] for own in pieces] for peer in range(channel.size)]
    receives = [[parts[peer] for _, parts in buffers] for peer in range(channel.size)]
    channel.exchange(sends, receives)
    outputs = []
    for collective, own, (whole, parts) in zip(collectives, pieces, buffers, strict=True):
        mine = own[channel.index]
        if whole is not None:
            parts[channel.index].copy_(mine)
            outputs.append(whole)
        else:
            outputs.append(torch.cat(parts, collective.dim))
    return tuple(outputs)


def _buffers(
    collective: Collective, mine: Tensor, index: int
) -> tuple[Tensor | None, list[Tensor]]:
    """Places for the pieces of all ranks: parts of the output itself where they are contiguous in it (dimension 0)."""
    shapes = [_with_size(mine.shape, collective.dim, size) for size in collective.sizes]
    if collective.dim:
        parts = [mine if peer == index else mine.new_empty(s) for peer, s in enumerate(shapes)]
        return None, parts
    whole = mine.new_empty(_with_size(mine.shape, 0, sum(collective.sizes)))
    return whole, list(whole.split_with_sizes(collective.sizes))


def _with_size(shape: Sequence[int], dim: int, size: int) -> list[int]:
    return [*shape[:dim], size, *shape[dim + 1 :]]


def _reduce_scatter(
    channel: Channel, collectives: Sequence[Collective], inputs: list[Tensor]
) -> tuple[Tensor, ...]:
    outputs: dict[int, Tensor] = {}
    split: dict[int, list[Tensor]] = {}
    for number, (each, tensor) in enumerate(zip(collectives, inputs, strict=True)):
        pieces = tensor.split_with_sizes(each.sizes, each.dim)
        if slices := slices_of(each):
            outputs[number] = _in_slices(channel, pieces, slices, each.reduction)
        else:
            split[number] = [piece.contiguous() for piece in pieces]
    for (_, reduction), alike in _alike(collectives).items():
        numbers = [number for number in alike if number in split]
        if numbers:
            joined = [[split[number][index] for number in numbers] for index in range(channel.size)]
            outputs.update(zip(numbers, channel.reduce_scatter(joined, reduction), strict=True))
    return tuple(outputs[number] for number in range(len(collectives)))


def _in_slices(
    channel: Channel, pieces: Sequence[Tensor], slices: Slices, reduction: str
) -> Tensor:
    made = torch.empty_like(pieces[channel.index], memory_format=torch.contiguous_format)
    for first in range(0, slices.extent, slices.length):
        parts = [[_cut(piece, slices, first).contiguous()] for piece in pieces]
        (mine,) = channel.reduce_scatter(parts, reduction)
        _cut(made, slices, first).copy_(mine)
    return made


def _cut(tensor: Tensor, slices: Slices, first: int) -> Tensor:
    """A view of a slice; the last one of a small piece may be short, or empty."""
    size = tensor.shape[slices.axis]
    first = min(first, size)
    return tensor.narrow(slices.axis, first, min(slices.length, size - first))


_RUNNERS: dict[
    CollectiveKind,
    Callable[[Channel, Sequence[Collective], list[Tensor]], tuple[Tensor, ...]],
] = {
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
}
