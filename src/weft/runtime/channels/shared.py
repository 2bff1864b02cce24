"""Communicators between the processes of one host, through memory that they share."""

from __future__ import annotations

import os
import select
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, final

import torch
from torch import Tensor

from weft.runtime.channels.channel import COMBINE, SIGNED
from weft.runtime.channels.process import ProcessChannel
from weft.runtime.channels.shared_link import SharedLink, connect, listener, offer
from weft.runtime.failures.board import FailureBoard
from weft.runtime.failures.stamps import check_stamp
from weft.runtime.failures.waits import PATIENCE

# Addresses that begin with a zero byte are no files.
_ADDRESS = "\0weft-{}"
# Nanoseconds that a wait may stay awake.
SPIN_NS = 60_000


@final
class SharedChannel(ProcessChannel):
    """One rank's end of a communicator whose ranks are processes of one host.

    Args:
        store: the job's store, to find the other ranks.
        number: of the communicator in the job; the same on all its ranks.
        ranks: in the communicator's order.
        index: position of this rank among them.
        board: where failures are made known to all ranks.
        timeout: seconds to wait for a peer.
    """

    interruptible = True

    def __init__(
        self,
        store: Any,
        number: int,
        ranks: Sequence[int],
        index: int,
        board: FailureBoard,
        timeout: float,
    ) -> None:
        super().__init__(ranks, index, torch.device("cpu"), board)
        self._timeout = timeout
        self._links = _links(store, f"weft/link/{number}", self.size, index, timeout)
        for peer, link in self._links.items():
            link.check = partial(check_stamp, peer=self.ranks[peer])
        self._poll = select.poll()
        self._by_descriptor = {link.socket.fileno(): link for link in self._links.values()}
        for descriptor in self._by_descriptor:
            self._poll.register(descriptor, select.POLLIN)

    def abort(self, error: BaseException) -> None:
        super().abort(error)
        for link in self._links.values():
            link.shut()

    def close(self) -> None:
        super().close()
        for link in self._links.values():
            link.close()

    def _all_reduce(self, tensors: Sequence[Tensor], reduction: str) -> None:
        if self.size != 2 or tensors[0].dtype in SIGNED:
            super()._all_reduce(tensors, reduction)
            return
        self.sent[self.running] += sum(tensor.nbytes for tensor in tensors)
        self._reduce(tensors, tensors, tensors, reduction)

    def reduce_scatter(self, pieces: Sequence[Sequence[Tensor]], reduction: str) -> list[Tensor]:
        mine = pieces[self.index]
        if self.size != 2 or (mine and mine[0].dtype in SIGNED):
            return super().reduce_scatter(pieces, reduction)
        sends = pieces[1 - self.index]
        made = list(map(torch.empty_like, mine))
        with self.counting("reduce_scatter"):
            self.sent[self.running] += sum(piece.nbytes for piece in sends)
            self._reduce(sends, made, mine, reduction)
        return made

    def _reduce(
        self,
        sends: Sequence[Tensor],
        places: Sequence[Tensor],
        own: Sequence[Tensor],
        reduction: str,
    ) -> None:
        """Between two ranks, reduce what comes with what is there as it comes.

        Both ends combine the same two numbers: these operations give the same bits either way.
        """
        combine = COMBINE[reduction]

        def take(place: Tensor, mine: Tensor, came: Tensor) -> None:
            combine(mine, came.view(mine.dtype), out=place)

        with self._explained("a reduction"):
            link = self._links[1 - self.index]
            link.stamp = self.stamp
            link.begin(sends, places, take, own)
            self._run()

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        with self._explained("an exchange"):
            for peer, link in self._links.items():
                link.stamp = self.stamp
                link.begin(sends[peer], receives[peer])
            self._run()

    def _run(self) -> None:
        """Until all links are done with the exchange that began."""
        waiting = [link for link in self._links.values() if link.busy]
        for link in waiting:
            link.advance()
        if waiting and self.spins:
            self._look_again()
        end = time.monotonic() + self._timeout
        while waiting := [link for link in waiting if link.busy]:
            left = end - time.monotonic()
            found = self._poll.poll(max(0.0, min(left, PATIENCE)) * 1000)
            for descriptor, _ in found:
                self._hear(descriptor)
            if not found:
                self._go_on_waiting(left)

    def _look_again(self) -> None:
        """For as long as it takes to fall asleep and wake up: a peer that is nearly there comes meanwhile.

        Whatever else wants the core gets it at once.
        """
        end = time.perf_counter_ns() + SPIN_NS
        while any(link.busy for link in self._links.values()) and time.perf_counter_ns() < end:
            for descriptor, _ in self._poll.poll(0):
                self._hear(descriptor)
            os.sched_yield()

    def _go_on_waiting(self, left: float) -> None:
        if left <= PATIENCE:
            raise TimeoutError(f"no answer within {self._timeout:g} s")
        self.while_waiting()

    def _hear(self, descriptor: int) -> None:
        link = self._by_descriptor[descriptor]
        link.listen()
        if link.closed:
            self._poll.unregister(descriptor)
        link.advance()

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        with super()._explained(what):
            try:
                yield
            except OSError as error:
                raise RuntimeError(str(error)) from error


def _links(store: Any, key: str, size: int, index: int, timeout: float) -> dict[int, SharedLink]:
    """A link to every other rank of a communicator, by its position there."""
    address = _ADDRESS.format(uuid.uuid4().hex)
    with listener(address) as listening:
        store.set(f"{key}/{index}", address[1:])
        links = {
            lower: connect(_ADDRESS[0] + store.get(f"{key}/{lower}").decode(), index, timeout)
            for lower in range(index)
        }
        links.update(offer(listening, timeout) for _ in range(index + 1, size))
    return links
