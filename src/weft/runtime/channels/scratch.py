"""Memory that a channel keeps for what arrives in a reduction: a fixed part of the transport, taken once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import final

import torch
from torch import Tensor

# Bytes that are reduced at a time: large enough for the links, small beside a model.
SLICE = 4 * 2**20
# Where the places in a buffer begin.
_ALIGNED = 16


@final
class Scratch:
    """Buffers that are made when more is needed than ever before, and kept.

    Args:
        device: where they lie.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []

    def places(self, counts: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Tensors of so many elements each, whose content is anything; they hold until the next call."""
        lengths = [-(-count * dtype.itemsize // _ALIGNED) * _ALIGNED for count in counts]
        pieces = self._of(sum(lengths))[: sum(lengths)].split_with_sizes(lengths)
        return [
            piece[: count * dtype.itemsize].view(dtype)
            for piece, count in zip(pieces, counts, strict=True)
        ]

    def _of(self, size: int) -> Tensor:
        if not self._buffers or self._buffers[-1].numel() < size:
            # Twice as much as before at least, so that all of them together are small beside the last.
            more = max(size, 2 * self._buffers[-1].numel()) if self._buffers else size
            self._buffers.append(torch.empty(more, dtype=torch.uint8, device=self._device))
        return self._buffers[-1]


def in_slices(tensors: Sequence[Tensor], most: int = SLICE) -> Iterator[list[Tensor]]:
    """Flat views of contiguous tensors of one dtype, all their elements in order, at most so many bytes at a time."""
    views: list[Tensor] = []
    room = most
    for tensor in tensors:
        flat, start = tensor.view(-1), 0
        while start < flat.numel():
            count = min(room // flat.itemsize, flat.numel() - start)
            views.append(flat[start : start + count])
            start, room = start + count, room - count * flat.itemsize
            if room < flat.itemsize:
                yield views
                views, room = [], most
    if views:
        yield views
