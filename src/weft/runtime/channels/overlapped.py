"""An all-reduce in slices that overlap: while one is reduced and sent to all, the next one arrives.

Without it a link rests twice for each slice: while the slice is reduced, and until the first byte of the answer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Protocol, TypeAlias, final

import torch
from torch import Tensor

from weft.runtime.channels.channel import Scratch, joined, parts_for, reduce_in_order

# For every peer, the tensors that it gets, or sends here.
Pieces: TypeAlias = Sequence[Sequence[Tensor]]
# Bytes of a slice: its latency is small beside its time on links of 10 Gbit/s.
SLICE = 2**20


class Posting(Protocol):
    """One rank's end of a communicator that begins exchanges, and waits for them later."""

    index: int

    @property
    def size(self) -> int:
        """Number of ranks."""

    def post(self, sends: Pieces, receives: Pieces, turn: int) -> Callable[[], None]:
        """Begin an exchange; returns what waits for its end. Exchanges on their way at once have turns of their own."""

    def count(self, sends: Pieces) -> None:
        """Count what is sent to others."""


@final
@dataclass(frozen=True)
class _Slice:
    """A slice on its way.

    Attributes:
        turn: 0 or 1, in turns: slices with the same one share buffers.
        pieces: for every rank, its part of the slice.
        came: for every rank, what it sent of this rank's part; at this rank's place its own.
        wait: waits for what came.
        stack: what is to be done when all is reduced.
    """

    turn: int
    pieces: Pieces
    came: Pieces
    wait: Callable[[], None]
    stack: ExitStack


@final
class OverlappedReduction:
    """All-reduces of one channel, two slices at a time."""

    def __init__(self, channel: Posting, device: torch.device) -> None:
        self._channel = channel
        # Of each turn: for what is joined, and for what arrives.
        self._buffers = [(Scratch(device), Scratch(device)) for _ in range(2)]

    def reduce(self, slices: Sequence[list[Tensor]], reduction: str) -> None:
        """Reduce the views of each slice over all ranks, in place, in the order of the ranks."""
        coming, going = self._begin(0, slices[0]), _nothing
        for number, views in enumerate([*slices[1:], None], 1):
            now = coming
            going()  # the next slice takes its buffers
            if views is not None:
                coming = self._begin(number % 2, views)
            going = self._reduced(now, reduction)
        going()

    def _begin(self, turn: int, views: list[Tensor]) -> _Slice:
        """Send every rank its part of a slice."""
        channel, (flat, arrived) = self._channel, self._buffers[turn]
        stack = ExitStack()
        pieces = parts_for(stack.enter_context(joined(views, flat)), channel.size)
        mine, others = pieces[channel.index], channel.size - 1
        places = arrived.places([piece.numel() for piece in mine] * others, mine[0].dtype)
        came = [places[peer * len(mine) : (peer + 1) * len(mine)] for peer in range(others)]
        came.insert(channel.index, list(mine))
        channel.count(pieces)
        return _Slice(turn, pieces, came, channel.post(pieces, came, 2 * turn), stack)

    def _reduced(self, each: _Slice, reduction: str) -> Callable[[], None]:
        """Reduce this rank's part, and send it to all; returns what waits until theirs have come."""
        channel = self._channel
        each.wait()
        mine = each.pieces[channel.index]
        for number, piece in enumerate(mine):
            of_ranks = [parts[number] for parts in each.came]
            piece.copy_(reduce_in_order(of_ranks, reduction, of_ranks[not channel.index]))
        channel.count([mine] * channel.size)
        wait = channel.post([mine] * channel.size, each.pieces, 2 * each.turn + 1)

        def end() -> None:
            wait()
            each.stack.close()

        return end


def _nothing() -> None:
    pass
