"""Communicators between the processes of one host, through memory that they share."""

from __future__ import annotations

import os
import select
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import final

import torch
from torch import Tensor

from weft.errors import NoAnswer
from weft.runtime.channels.channel import COMBINE, SIGNED
from weft.runtime.channels.process import ProcessChannel
from weft.runtime.channels.shared_link import SharedLink, Take, connect, listener, offer
from weft.runtime.failures.call_log import check_step_checksum
from weft.runtime.failures.failure_store import PATIENCE, FailureStore, StoreEntries, first_line

# Addresses that begin with a zero byte are not files.
_ADDRESS = "\0weft-{}"
# To which ranks come that connect, in errors.
_PLACE = "a link between processes of this host"
# Nanoseconds that a wait may stay awake.
SPIN_NS = 60_000


@final
class SharedChannel(ProcessChannel):
    """One rank's end of a communicator whose ranks are processes of one host.

    Args:
        entries: of the job's store, to find the other ranks.
        number: of the communicator in the job; the same on all its ranks.
    """

    interruptible = True

    def __init__(
        self,
        entries: StoreEntries,
        number: int,
        ranks: Sequence[int],
        index: int,
        board: FailureStore,
        timeout: float,
    ) -> None:
        super().__init__(ranks, index, torch.device("cpu"), board)
        self._timeout = timeout
        self._in_turn = False
        self._links = _links(entries, f"weft/link/{number}", ranks, index, timeout)
        for peer, link in self._links.items():
            link.check = partial(check_step_checksum, peer=self.ranks[peer])
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
        """Two ranks exchange everything; of more ranks, each reduces a part and sends it to all.

        The parts of a slice fit into the slots, so no rank waits for another to empty them.
        """
        if self.size == 2 and tensors[0].dtype not in SIGNED:
            self._reduce([tensors, tensors], tensors, tensors, reduction)
        else:
            super()._all_reduce(tensors, reduction)

    def _reduce_parts(self, pieces: Sequence[Sequence[Tensor]], reduction: str) -> None:
        mine = pieces[self.index]
        if mine[0].dtype in SIGNED:
            super()._reduce_parts(pieces, reduction)
            return
        with self.counting("reduce_scatter"):
            self._reduce(pieces, mine, mine, reduction)
        self.exchange([mine] * self.size, pieces)

    def reduce_scatter(self, pieces: Sequence[Sequence[Tensor]], reduction: str) -> list[Tensor]:
        mine = pieces[self.index]
        if self.size == 1 or (mine and mine[0].dtype in SIGNED):
            return super().reduce_scatter(pieces, reduction)
        made = list(map(torch.empty_like, mine))
        with self.counting("reduce_scatter"):
            self._reduce(pieces, made, mine, reduction)
        return made

    def _reduce(
        self,
        pieces: Sequence[Sequence[Tensor]],
        places: Sequence[Tensor],
        own: Sequence[Tensor],
        reduction: str,
    ) -> None:
        """Reduce what comes with what is there, as it comes: chunk by chunk, in each from the first rank to the last.

        So the bits are those of `reduce_in_order`. With two ranks both may reduce everything, since all reductions
        give the same bits either way.
        """
        self.sent[self.running] += sum(
            part.nbytes for peer, parts in enumerate(pieces) if peer != self.index for part in parts
        )
        links = [self._links[peer] for peer in sorted(self._links)]
        takes = received_uses(self.size, self.index, reduction)
        with self._explained("a reduction"):
            for number, (peer, take) in enumerate(zip(sorted(self._links), takes, strict=True)):
                links[number].checksum = self.checksum
                # For more than two ranks, nobody sends from the places.
                mine = own if self.size == 2 else list(own)
                links[number].begin(pieces[peer], places, take, mine, _turn(links, number))
            self._run(in_turn=True)

    def _exchange(
        self, sends: Sequence[Sequence[Tensor]], receives: Sequence[Sequence[Tensor]]
    ) -> None:
        with self._explained("an exchange"):
            for peer, link in self._links.items():
                link.checksum = self.checksum
                link.begin(sends[peer], receives[peer])
            self._run()

    def _run(self, in_turn: bool = False) -> None:
        """Until all links are done with the exchange that began; `in_turn` where they wait for each other."""
        self._in_turn = in_turn
        waiting = [link for link in self._links.values() if link.busy]
        self._advance(waiting)
        if waiting and self.spins:
            self._look_again()
        end = time.monotonic() + self._timeout
        while waiting := [link for link in waiting if link.busy]:
            left = end - time.monotonic()
            found = self._poll.poll(max(0.0, min(left, PATIENCE)) * 1000)
            for descriptor, _ in found:
                self._hear(descriptor)
            if not found and left <= PATIENCE:
                raise TimeoutError(f"no answer within {self._timeout:g} s")
            if not found:
                self.while_waiting()

    def _look_again(self) -> None:
        """Spin for as long as it takes to fall asleep and wake up, because a peer may arrive within that time.

        Whatever else wants the core gets it at once.
        """
        end = time.perf_counter_ns() + SPIN_NS
        while any(link.busy for link in self._links.values()) and time.perf_counter_ns() < end:
            for descriptor, _ in self._poll.poll(0):
                self._hear(descriptor)
            os.sched_yield()

    def _hear(self, descriptor: int) -> None:
        link = self._by_descriptor[descriptor]
        link.listen()
        if link.closed:
            self._poll.unregister(descriptor)
        self._advance(list(self._links.values()) if self._in_turn else [link])

    def _advance(self, links: Sequence[SharedLink]) -> None:
        """Have links do what they can; where they take in turn, until none can do any more."""
        left = -1
        while left != (left := sum(len(link.incoming) for link in links)):
            for link in links:
                link.advance()
            if not self._in_turn:
                break

    @contextmanager
    def _explained(self, what: str) -> Iterator[None]:
        with super()._explained(what):
            try:
                yield
            except OSError as error:
                raise RuntimeError(str(error)) from error


def received_uses(size: int, index: int, reduction: str) -> list[Take]:
    """For each peer of a rank, the uses of the received data, in order, one chunk at a time."""
    combine = COMBINE[reduction]
    # Reductions of peers before this rank, until its own numbers are read: by where the result goes.
    begun: dict[int, Tensor] = {}

    def first(place: Tensor, own: Tensor, came: Tensor) -> None:
        combine(own, came.view(own.dtype), out=place)

    def later(place: Tensor, own: Tensor, came: Tensor) -> None:
        combine(place, came.view(own.dtype), out=place)

    def before(place: Tensor, own: Tensor, came: Tensor) -> None:
        there = begun.get(place.data_ptr())
        if there is None:
            begun[place.data_ptr()] = came.view(own.dtype).clone()
        else:
            combine(there, came.view(own.dtype), out=there)

    def last_before(place: Tensor, own: Tensor, came: Tensor) -> None:
        there, numbers = begun.pop(place.data_ptr(), None), came.view(own.dtype)
        combine(numbers if there is None else combine(there, numbers, out=there), own, out=place)

    after = [later] * (size - 1 - index)
    return [*[before] * (index - 1), last_before, *after] if index else [first, *after[1:]]


def _turn(links: Sequence[SharedLink], number: int) -> Callable[[], bool]:
    """True while a link may take its next chunk: the one before it has, and all have taken the chunks before."""
    link, previous = links[number], links[number - 1]
    if number == 0:
        return lambda: len(link.incoming) == len(previous.incoming)
    return lambda: len(link.incoming) > len(previous.incoming)


def _links(
    entries: StoreEntries, key: str, ranks: Sequence[int], index: int, timeout: float
) -> dict[int, SharedLink]:
    """A link to every other rank of a communicator, by its position there."""
    address = _ADDRESS.format(uuid.uuid4().hex)
    links: dict[int, SharedLink] = {}
    try:
        with listener(address) as listening:
            entries.write(f"{key}/{index}", address[1:])
            for lower, rank in enumerate(ranks[:index]):
                there = _ADDRESS[0] + entries.read(f"{key}/{lower}", rank, _PLACE)
                look = partial(entries.look, [rank], _PLACE)
                with _named(ranks[index], [rank], timeout):
                    links[lower] = connect(there, index, timeout, look)
            while missing := [n for n in range(index + 1, len(ranks)) if n not in links]:
                waits = [ranks[number] for number in missing]
                with _named(ranks[index], waits, timeout):
                    links.update([offer(listening, timeout, partial(entries.look, waits, _PLACE))])
    except BaseException:
        for link in links.values():
            link.close()
        raise
    return links


@contextmanager
def _named(rank: int, waits: Sequence[int], timeout: float) -> Iterator[None]:
    """Say of an error of a socket for whom a rank waits."""
    try:
        yield
    except (TimeoutError, BrokenPipeError, ConnectionRefusedError, ConnectionResetError) as error:
        raise NoAnswer(
            f"rank {rank} waits for a link to one of {list(waits)}, which has ended or did not answer within "
            f"{timeout:.0f} s: {first_line(error)}"
        ) from error
