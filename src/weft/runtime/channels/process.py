"""Communicators between processes, over process groups of `torch.distributed`.

Gloo is used for its sends and receives only: pieces may differ in size, no piece is copied before
it is sent, large all-gathers and reduce-scatters are several times faster than Gloo's own, and sums
run in the order of the ranks, so that every rank gets the same bits as in a local world.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, final

import torch
import torch.distributed as dist
from torch import Tensor

from weft.errors import NoAnswer
from weft.runtime.channels.channel import (
    Channel,
    Scratch,
    arrivals,
    in_slices,
    joined,
    parts_for,
    reduce_arrived,
)
from weft.runtime.failures.call_log import check_step_checksum
from weft.runtime.failures.failure_store import CallThread, FailureStore, first_line

# No exchange has so many pieces for a peer; the last place is that of a checksum.
_PLACES = 1 << 20
_STAMP = _PLACES - 1
# The turn of an exchange that runs by itself, after those of an overlapped reduction.
_ALONE = 4

# How long a broken connection may wait for the peer's own account of what went wrong.
EXPLANATION_SECONDS = 1.0


class ProcessChannel(Channel):
    """One rank's end of a communicator between processes.

    Args:
        board: publishes failures to all ranks.

    Attributes:
        lost: the kind of errors of the backend by which a peer can be lost.
    """

    lost: type[RuntimeError] = RuntimeError

    def __init__(
        self, ranks: Sequence[int], index: int, device: torch.device, board: FailureStore
    ) -> None:
        super().__init__(ranks, index, device)
        self._board = board
        self._watchers: list[Callable[[BaseException], object]] = []
        # The ranks' current operation, as text for errors.
        self.account: Callable[[], str] = str

    def watch(self, fail: Callable[[BaseException], object]) -> None:
        self._board.watch(fail)
        self._watchers.append(fail)

    def abort(self, error: BaseException) -> None:
        self._board.announce(error)

    @property
    def board(self) -> FailureStore:
        """The failure store by which failures and long waits are made known to all ranks."""
        return self._board

    def close(self) -> None:
        for fail in self._watchers:
            self._board.forget(fail)

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            known = self._board.cause(EXPLANATION_SECONDS)
            if known is not None:
                raise known from error
            if not isinstance(error, self.lost):
                raise
            peers = [rank for rank in self.ranks if rank != self.rank]
            raise NoAnswer(
                f"rank {self.rank}: {what} with ranks {peers} failed, so a peer died, ended early or did not answer "
                f"in time: {first_line(error)}{self.account()}"
            ) from error


class GroupChannel(ProcessChannel):
    """A communicator over a process group of `torch.distributed`.

    Attributes:
        has_room: true if messages carry checksums.
        beside: a channel of the host between the same ranks, by which they compare checksums elsewhere.
    """

    has_room = False
    beside: GlooChannel | None = None

    def __init__(
        self,
        group: Any,
        ranks: Sequence[int],
        index: int,
        device: torch.device,
        board: FailureStore,
    ) -> None:
        super().__init__(ranks, index, device, board)
        self._group = group
        by_rank = sorted(self.ranks)
        # For every peer, its number in the process group.
        self._members = [by_rank.index(rank) for rank in self.ranks]

    def close(self) -> None:
        super().close()
        if not self._board.failed:
            dist.destroy_process_group(self._group)
        if self.beside is not None:
            self.beside.close()

    def compare(self) -> None:
        """Compare a new checksum in rounds, after which each rank has heard, by others, of all: none continues
        alone.
        """
        beside = self.beside
        if beside is None or self.checksum == beside.checksum:
            return
        beside.checksum, beside.while_waiting = self.checksum, self._look
        for turn in range((self.size - 1).bit_length()):
            after, before = ((self.index + way) % self.size for way in (1 << turn, -1 << turn))
            sends, receives = (
                [[torch.zeros(1)] if peer == other else [] for peer in range(self.size)]
                for other in (after, before)
            )
            beside.exchange(sends, receives)

    def _look(self) -> None:
        known = self._board.cause(0)
        if known is not None:
            raise known
        self.while_waiting()

    def _pairs(self, tensors: Sequence[Sequence[Tensor]]) -> Iterator[tuple[int, int, Tensor]]:
        """(peer's number, place, bytes) of every piece that is not empty and not this rank's own."""
        for peer, parts in enumerate(tensors):
            if peer == self.index:
                continue
            for tag, part in enumerate(parts):
                if part.numel():
                    yield self._members[peer], tag, _bytes(part)


@final
class GlooChannel(GroupChannel):
    """A communicator between CPU processes.

    Nothing ends Gloo's waits. If somebody is told of failures, as executors are, another thread
    looks around meanwhile; else Gloo waits in another thread. The checksum of a step goes to each peer
    with the first message that it gets in the step.
    """

    has_room = True

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._other = CallThread(f"weft rank {self.rank} gloo")
        self._overlapped = OverlappedReduction(self, self.device)
        # The checksums that went with messages to, and came from, peers by their numbers in the group.
        self._went: dict[int, int] = {}
        self._came: dict[int, int] = {}

    def close(self) -> None:
        super().close()
        self._other.close()

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        self._watched(lambda: self.post(sends, receives, _ALONE)())

    def _all_reduce(self, tensors: Sequence[Tensor], reduction: str) -> None:
        slices = list(in_slices(tensors, SLICE))
        if len(slices) < 2:
            super()._all_reduce(tensors, reduction)
        else:
            self._watched(partial(self._overlapped.reduce, slices, reduction))

    def _watched(self, call: Callable[[], None]) -> None:
        with self._explained("an exchange"):
            if self._watchers:
                with self._board.watchdog.over(self.while_waiting, self._fail):
                    call()
            else:
                self._other.run(call, self.while_waiting)

    def _fail(self, error: Exception) -> None:
        for fail in self._watchers:
            fail(error)

    def post(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]], turn: int
    ) -> Callable[[], None]:
        """Begin an exchange; returns what waits for its end. Exchanges on their way at once have turns of their own."""
        coming, going = list(self._pairs(receives)), list(self._pairs(sends))
        stamps = {
            peer: torch.zeros(1, dtype=torch.int64)
            for peer in self._unstamped(self._came, [peer for peer, _, _ in coming])
        }
        own = torch.tensor([self.checksum])
        coming += [(peer, _STAMP, checksum) for peer, checksum in stamps.items()]
        going += [
            (peer, _STAMP, own)
            for peer in self._unstamped(self._went, [peer for peer, _, _ in going])
        ]
        first = turn * _PLACES
        works = [
            dist.irecv(part, group=self._group, group_src=peer, tag=first + place)
            for peer, place, part in coming
        ]
        works += [
            dist.isend(part, group=self._group, group_dst=peer, tag=first + place)
            for peer, place, part in going
        ]

        def wait() -> None:
            for work in works:
                if work is not None:
                    work.wait()
            for peer, came in stamps.items():
                check_step_checksum(self.checksum, int(came), self.ranks[self._members.index(peer)])

        return wait

    def _unstamped(self, stamped: dict[int, int], peers: Sequence[int]) -> list[int]:
        """The peers with which no checksum of this step was exchanged; it is from now on."""
        new = [peer for peer in dict.fromkeys(peers) if stamped.get(peer, 0) != self.checksum]
        stamped.update(dict.fromkeys(new, self.checksum))
        return new


@final
class NcclChannel(GroupChannel):
    """A communicator between CUDA devices. Collectives that NCCL has run in NCCL."""

    lost = dist.DistError

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        # NCCL connects ranks in their first operation, which all of them must take part in; in an
        # exchange some may have nothing to send.
        self.barrier()
        self.sent.clear()

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        sizes = [[part.nbytes for part in parts] for parts in receives]
        even = all(size == sizes[0] for size in sizes) and all(sizes[0])
        if self.running == "all_gather" and even:  # and no piece is empty
            self._all_gather(sends[self.index], receives)
            return
        group: Any = self._group
        with self._explained("an exchange"):
            operations = [
                dist.P2POp(dist.irecv, part, group=group, group_peer=peer, tag=tag)
                for peer, tag, part in self._pairs(receives)
            ]
            operations += [
                dist.P2POp(dist.isend, part, group=group, group_peer=peer, tag=tag)
                for peer, tag, part in self._pairs(sends)
            ]
            for work in dist.batch_isend_irecv(operations) if operations else ():
                work.wait()

    def _all_gather(self, mine: Sequence[Tensor], receives: Sequence[Sequence[Tensor]]) -> None:
        """Send the pieces of every rank to all: along NCCL's rings each crosses between two hosts once."""
        with self._explained("an all_gather"):
            for number, part in enumerate(mine):
                arrived = {
                    member: _bytes(parts[number])
                    for member, parts in zip(self._members, receives, strict=True)
                }
                places = [arrived[member] for member in sorted(arrived)]
                dist.all_gather(places, _bytes(part), group=self._group)

    def _all_reduce(self, tensors: Sequence[Tensor], reduction: str) -> None:
        if not _reduces(tensors[0], reduction):
            super()._all_reduce(tensors, reduction)
            return
        with joined(tensors, self._flat) as whole, self._explained("an all_reduce"):
            for tensor in whole:
                # NCCL's ring: every piece goes once around to be reduced, and once around to be shared.
                pieces = [piece.nbytes for piece in tensor.view(-1).tensor_split(self.size)]
                self.sent[self.running] += sum(pieces) + (self.size - 2) * pieces[self.index]
                real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
                dist.all_reduce(real, _OPERATIONS[reduction], group=self._group)

    def reduce_scatter(self, pieces: Sequence[Sequence[Tensor]], reduction: str) -> list[Tensor]:
        mine = pieces[self.index]
        shapes = [own.shape for own in mine]
        even = all([part.shape for part in parts] == shapes for parts in pieces)
        numel = sum(own.numel() for own in mine)
        floats = mine[0].is_floating_point() and _reduces(mine[0], reduction)
        if not (even and floats and numel):
            return super().reduce_scatter(pieces, reduction)
        ordered: list[Sequence[Tensor]] = [mine] * self.size
        for member, parts in zip(self._members, pieces, strict=True):
            ordered[member] = parts
        self.sent[self.running] += (self.size - 1) * numel * mine[0].itemsize
        flat = torch.cat([part.reshape(-1) for parts in ordered for part in parts])
        made = flat.new_empty(numel)
        with self._explained("a reduce_scatter"):
            dist.reduce_scatter_tensor(made, flat, _OPERATIONS[reduction], group=self._group)
        split = made.split_with_sizes([own.numel() for own in mine])
        return [part.view(own.shape) for part, own in zip(split, mine, strict=True)]

    def abort(self, error: BaseException) -> None:
        super().abort(error)
        self._group.abort()


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _reduces(tensor: Tensor, reduction: str) -> bool:
    if tensor.is_complex():
        return reduction == "sum"
    return tensor.dtype in _REDUCED and reduction in _OPERATIONS


_REDUCED = {torch.float64, torch.float32, torch.float16, torch.bfloat16}
_REDUCED |= {torch.int64, torch.int32, torch.int8, torch.uint8}

_OPERATIONS: dict[str, Any] = {
    "sum": dist.ReduceOp.SUM,
    "max": dist.ReduceOp.MAX,
    "min": dist.ReduceOp.MIN,
    "prod": dist.ReduceOp.PRODUCT,
}


# An all-reduce in slices that overlap: while one is reduced and sent to all, the next one arrives.
#
# Without it a link rests twice for each slice: while the slice is reduced, and until the first byte of the answer.


# For every peer, the tensors that it gets, or sends here.
Pieces: TypeAlias = Sequence[Sequence[Tensor]]
# Bytes of a slice: its latency is small beside its time on links of 10 Gbit/s.
SLICE = 2**20


@final
@dataclass(frozen=True)
class _Slice:
    """A slice that is being exchanged.

    Attributes:
        turn: 0 or 1, alternating: slices with the same number share buffers.
        came: for every rank, its piece of this rank's part, received; at this rank's place its own piece.
    """

    turn: int
    pieces: Pieces
    came: Pieces
    wait: Callable[[], None]
    stack: ExitStack


@final
class OverlappedReduction:
    """All-reduces of one channel, two slices at a time."""

    def __init__(self, channel: GlooChannel, device: torch.device) -> None:
        self._channel = channel
        # For each turn: for what is joined, and for what arrives.
        self._buffers = [(Scratch(device), Scratch(device)) for _ in range(2)]

    def reduce(self, slices: Sequence[list[Tensor]], reduction: str) -> None:
        """Reduce the views of each slice over all ranks, in place, in the order of the ranks."""
        coming = self._begin(0, slices[0])
        going: Callable[[], object] = lambda: None  # noqa: E731
        for number, views in enumerate([*slices[1:], None], 1):
            now = coming
            going()  # the next slice takes its buffers
            if views is not None:
                coming = self._begin(number % 2, views)
            going = self._reduced(now, reduction)
        going()

    def _begin(self, turn: int, views: list[Tensor]) -> _Slice:
        channel, (flat, arrived) = self._channel, self._buffers[turn]
        stack = ExitStack()
        pieces = parts_for(stack.enter_context(joined(views, flat)), channel.size)
        came = arrivals(pieces[channel.index], channel.index, channel.size, arrived)
        channel.count(pieces)
        return _Slice(turn, pieces, came, channel.post(pieces, came, 2 * turn), stack)

    def _reduced(self, each: _Slice, reduction: str) -> Callable[[], None]:
        """Reduce this rank's part, and send it to all; returns what waits until theirs have come."""
        channel = self._channel
        each.wait()
        mine = each.pieces[channel.index]
        reduce_arrived(each.came, channel.index, reduction)
        channel.count([mine] * channel.size)
        wait = channel.post([mine] * channel.size, each.pieces, 2 * each.turn + 1)

        def end() -> None:
            wait()
            each.stack.close()

        return end
