"""Communicators between ranks that are threads of one process: they read each other's tensors."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, final

import torch
from torch import Tensor

from weft.errors import InternalError, RankFailure
from weft.runtime.channels.channel import (
    Channel,
    in_slices,
    parts_for,
    reduce_in_order,
    reduce_into,
)
from weft.runtime.failures.failure_store import PeerFailure, first_line


@final
class LocalGroup:
    """The memory that the ranks of one communicator share: a place for each rank's tensors, and a barrier.

    In a collective each rank stores its tensors, waits at the barrier, reads the others' tensors, and
    waits again. Then all have read, so tensors may be changed or freed.
    """

    def __init__(self, ranks: Sequence[int], timeout: float) -> None:
        self.ranks = tuple(ranks)
        self.timeout = timeout
        # The tensors that each rank put down for the current collective; None between collectives.
        self.places: list[tuple[str, Any] | None] = [None] * len(self.ranks)
        # The first failure of a member: (rank, error). Set at most once, before the barrier breaks.
        self.failure: tuple[int, BaseException] | None = None
        self._barrier = threading.Barrier(len(self.ranks))
        self._lock = threading.Lock()

    def put(self, index: int, kind: str, content: Any) -> list[Any]:
        """Put `content` down and return what all ranks put down, once all have."""
        self.places[index] = (kind, content)
        self.meet(index, kind)
        found = [place for place in self.places if place is not None]
        if any(other != kind for other, _ in found):
            kinds = {rank: other for rank, (other, _) in zip(self.ranks, found, strict=True)}
            raise InternalError(f"ranks run different collectives on one communicator: {kinds}")
        return [content for _, content in found]

    def leave(self, index: int, kind: str) -> None:
        """Return once all ranks have read what they need."""
        self.meet(index, kind)
        self.places[index] = None

    def abort(self, rank: int, error: BaseException) -> None:
        """Wake all members, now and in every later collective."""
        with self._lock:
            if self.failure is None:
                self.failure = (rank, error)
        self._barrier.abort()

    def meet(self, index: int, kind: str) -> None:
        """Return once all ranks have come here."""
        try:
            self._barrier.wait(self.timeout)
        except threading.BrokenBarrierError:
            raise self._broken(index, kind) from (self.failure and self.failure[1])

    def _broken(self, index: int, kind: str) -> RankFailure:
        if self.failure is not None:
            rank, error = self.failure
            return PeerFailure(
                f"rank {self.ranks[index]} stopped in {kind}: rank {rank} failed: {first_line(error)}"
            )
        pairs = zip(self.ranks, self.places, strict=True)
        missing = [rank for rank, place in pairs if place is None]
        return RankFailure(
            f"rank {self.ranks[index]} waited {self.timeout:g} s in {kind} for ranks {missing} of {self.ranks}; "
            "see what they do, or give a longer weft.local_world(…, timeout=…)"
        )


class LocalChannel(Channel):
    """One rank's end of a `LocalGroup`."""

    interruptible = True

    def __init__(self, group: LocalGroup, index: int, device: torch.device) -> None:
        super().__init__(group.ranks, index, device)
        self._group = group

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        everyone = self._group.put(self.index, self.running, sends)
        for peer, buffers in enumerate(receives):
            if peer == self.index:
                continue
            for buffer, tensor in zip(buffers, everyone[peer][self.index], strict=True):
                _check_piece(self.ranks[peer], buffer, tensor)
                buffer.copy_(tensor)
        # Nothing of other ranks is held any more: they may free it at once.
        self._group.leave(self.index, self.running)

    def _all_reduce(self, tensors: Sequence[Tensor], reduction: str) -> None:
        """Each rank reduces one part of all ranks' tensors where it is, then fetches the others."""
        # Cut by their own rank: whoever reduces them makes no views of tensors that are not its own.
        pieces = [
            [view for views in in_slices(parts) for view in views]
            for parts in parts_for(tensors, self.size)
        ]
        own = sum(piece.nbytes for piece in pieces[self.index])
        whole = sum(tensor.nbytes for tensor in tensors)
        self.sent[self.running] += whole + (self.size - 2) * own
        self._reduce_parts(pieces, reduction)
        # Nothing of other ranks is held any more: they may free it at once.
        self._group.leave(self.index, self.running)

    def _reduce_parts(self, pieces: Sequence[Sequence[Tensor]], reduction: str) -> None:
        everyone = self._group.put(self.index, self.running, pieces)
        for number, piece in enumerate(pieces[self.index]):
            others = [of_rank[self.index][number] for of_rank in everyone]
            for rank, other in zip(self.ranks, others, strict=True):
                _check_piece(rank, piece, other)
            self._reduce_piece(piece, others, reduction)
        self._group.meet(self.index, self.running)
        for peer, of_rank in enumerate(everyone):
            if peer != self.index and of_rank[peer]:
                torch._foreach_copy_(list(pieces[peer]), of_rank[peer])

    def _reduce_piece(self, piece: Tensor, others: Sequence[Tensor], reduction: str) -> None:
        """Reduce from the first rank's to the last's: into this rank's where it is one of the first two."""
        if self.index < 2:
            reduce_into(piece, others, reduction)
            return
        (place,) = self._arrived.places([piece.numel()], piece.dtype)
        first = place.copy_(others[0])
        piece.copy_(reduce_in_order([first, *others[1:]], reduction, first))

    def abort(self, error: BaseException) -> None:
        self._group.abort(self.rank, error)

    def watch(self, fail: Callable[[BaseException], object]) -> None:
        """Nothing to do: whoever waits in a local group is woken."""

    def close(self) -> None:
        """Nothing is held."""


def _check_piece(rank: int, buffer: Tensor, tensor: Tensor) -> None:
    if buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
        raise InternalError(
            f"rank {rank} sends {tensor.dtype} {tuple(tensor.shape)} where {buffer.dtype} {tuple(buffer.shape)} "
            "is expected"
        )
