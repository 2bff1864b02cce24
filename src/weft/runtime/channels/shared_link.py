"""Two processes of one host: a piece of memory that both map, and a socket over which they wake each other.

The memory has no name (`memfd_create`) and is handed over through the socket, so nothing is left
behind however a process ends, and an end that closes is seen at once by the other. A process that
waits sleeps in the kernel and burns no core.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import struct
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar, final

import torch
from torch import Tensor

from weft.errors import InternalError

T = TypeVar("T")

# Seconds between two looks around while a process connects.
LOOK_SECONDS = 0.2
# Each direction has so many slots: while one is filled, others are read.
SLOTS = 4
SLOT_BYTES = 2**19
_NUMBER = struct.Struct("q")
# Before the bytes of a slot stands their number, and the checksum of the step that they belong to.
_HEADER = struct.Struct("qq")
_LINE = 64
_STRIDE = _LINE + SLOT_BYTES
# Before the slots, what each end has sent and received so far: two counts for the lower rank's end, two
# for the other's.
_SLOTS_START = 4 * _LINE
_BYTES = _SLOTS_START + 2 * SLOTS * _STRIDE
_WAKE = b"."
# Linux's fcntl: the size of sealed memory never changes, and no seal is taken off.
_ADD_SEALS, _GET_SEALS = 1033, 1034
_SEALS = 0x0001 | 0x0002 | 0x0004

# Pieces in a slot begin at multiples of this, so that any dtype can be read there.
_ALIGNED = 64

# Fills a place from what is there of one's own and what came as bytes. The first two are flat and of
# one size and dtype.
Take = Callable[[Tensor, Tensor, Tensor], object]


def _copy(place: Tensor, own: Tensor, came: Tensor) -> None:
    place.copy_(came.view(place.dtype))


def _at_once() -> bool:
    return True


# Pieces that pass in one slot: (place, own), of which sends have only one.
Chunk = list[tuple[Tensor, Tensor]]


@final
@dataclass
class SharedLink:
    """One process's end.

    Attributes:
        lower: true if this is the end of the lower rank, which writes into the first half.
        outgoing: chunks still to be sent in this exchange, at most `SLOT_BYTES` each.
        incoming: places of chunks still to be received.
        in_place: true if places may be sent from, too: none is taken before it was sent.
        turn: true when the next chunk may be taken; until then it stays where it is.
        peer_sent, peer_received: the peer's chunks since the beginning, as last looked up.
        checksum: goes with every chunk; `check(checksum, came)` is called with that of every chunk that came.
        closed: true if the peer has gone; what it sent before can still be received.
    """

    socket: socket.socket
    memory: Tensor
    numbers: mmap.mmap
    lower: bool
    outgoing: deque[Chunk] = field(default_factory=deque)
    incoming: deque[Chunk] = field(default_factory=deque)
    take: Take = _copy
    in_place: bool = False
    turn: Callable[[], bool] = _at_once
    sent: int = 0
    received: int = 0
    peer_sent: int = 0
    peer_received: int = 0
    checksum: int = 0
    check: Callable[[int, int], object] = lambda _own, _came: None
    closed: bool = False

    @property
    def busy(self) -> bool:
        """True while something is left to send or to receive."""
        return bool(self.outgoing or self.incoming)

    def begin(
        self,
        sends: Sequence[Tensor],
        receives: Sequence[Tensor],
        take: Take = _copy,
        own: Sequence[Tensor] | None = None,
        turn: Callable[[], bool] = _at_once,
    ) -> None:
        """Begin an exchange of contiguous tensors; the one before must be over.

        Args:
            own: for each place, the own tensor that `take` gets; by default the place.
            turn: true when the next chunk may be taken.
        """
        self.turn = turn
        self.take, self.in_place = take, own is receives
        self.outgoing.extend(_chunks(sends, sends))
        if self.in_place and sends is receives:
            self.incoming.extend(self.outgoing)
        else:
            self.incoming.extend(_chunks(receives, receives if own is None else own))

    def advance(self) -> None:
        """Fill and empty all slots that can be, and wake the peer."""
        before = self.sent + self.received
        while self.outgoing and self.sent - self.peer_received < SLOTS:
            self._send(self.outgoing.popleft())
        while self.incoming and self.received < self.peer_sent and self._may_take():
            self._receive(self.incoming.popleft())
        if self.sent + self.received > before:
            # Write this end's counts, then wake the peer: it looks at them afterwards.
            _NUMBER.pack_into(self.numbers, self._line(0, own=True), self.sent)
            _NUMBER.pack_into(self.numbers, self._line(1, own=True), self.received)
            with suppress(OSError):  # it has gone: `listen` will notice
                self.socket.sendall(_WAKE)
        # Only the peer could go on then: what it has sent may still be taken, when its turn comes.
        waits = self.outgoing or (self.incoming and self.received >= self.peer_sent)
        if self.closed and waits:
            raise ConnectionError("the peer has closed its end")

    def listen(self) -> None:
        """Look up how far the peer is; to be called when the socket is readable."""
        try:
            self.closed = not self.socket.recv(64)
        except ConnectionError:  # it left before it had heard everything
            self.closed = True
        self.peer_sent = self._count(0, own=False)
        self.peer_received = self._count(1, own=False)

    def shut(self) -> None:
        """Wake whoever waits at either end; from any thread."""
        with suppress(OSError):  # the peer was faster
            self.socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket; the peer notices."""
        self.socket.close()

    def _may_take(self) -> bool:
        if self.in_place and len(self.incoming) <= len(self.outgoing):
            return False
        return self.turn()

    def _send(self, chunk: Chunk) -> None:
        start, end = self._slot(self.sent, own=True), 0
        for _, piece in chunk:
            begin, end = _after(end, piece)
            self._bytes(start, begin, end).copy_(piece.view(torch.uint8))
        _HEADER.pack_into(self.numbers, start, end, self.checksum)
        self.sent += 1

    def _receive(self, chunk: Chunk) -> None:
        start, end = self._slot(self.received, own=False), 0
        size, checksum = _HEADER.unpack_from(self.numbers, start)
        if checksum != self.checksum:
            self.check(self.checksum, checksum)
        if size != _size(chunk):
            raise InternalError(
                f"a peer sends {size} bytes where {_size(chunk)} are expected: the ranks run "
                "different plans"
            )
        for place, own in chunk:
            begin, end = _after(end, place)
            self.take(place, own, self._bytes(start, begin, end))
        self.received += 1

    def _bytes(self, slot: int, begin: int, end: int) -> Tensor:
        start = slot + _LINE
        return self.memory[start + begin : start + end]

    def _count(self, which: int, own: bool) -> int:
        count: int = _NUMBER.unpack_from(self.numbers, self._line(which, own))[0]
        return count

    def _line(self, which: int, own: bool) -> int:
        return (which + (0 if own == self.lower else 2)) * _LINE

    def _slot(self, number: int, own: bool) -> int:
        half = 0 if own == self.lower else SLOTS
        return _SLOTS_START + (half + number % SLOTS) * _STRIDE


def _chunks(places: Sequence[Tensor], own: Sequence[Tensor]) -> Iterator[Chunk]:
    chunk: Chunk = []
    end = 0
    for place, mine in zip(places, own, strict=True):
        pieces = _pieces(place)
        for piece in zip(pieces, pieces if mine is place else _pieces(mine), strict=True):
            _, after = _after(end, piece[0])
            if after > SLOT_BYTES:
                yield chunk
                chunk, after = [], piece[0].nbytes
            chunk.append(piece)
            end = after
    if chunk:
        yield chunk


def _pieces(tensor: Tensor) -> Sequence[Tensor]:
    flat = tensor.detach().as_strided((tensor.numel(),), (1,))  # one element may have any stride
    if flat.nbytes <= SLOT_BYTES:
        return (flat,) if flat.numel() else ()
    return torch.split(flat, SLOT_BYTES // flat.itemsize)


def _after(end: int, piece: Tensor) -> tuple[int, int]:
    begin = -(-end // _ALIGNED) * _ALIGNED
    return begin, begin + piece.nbytes


def _size(chunk: Chunk) -> int:
    end = 0
    for place, _ in chunk:
        _, end = _after(end, place)
    return end


def host() -> str:
    """The name that is equal for processes that can be linked; "" if the system offers no such links."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Sockets without a file name belong to a network namespace, and users to one of their own: containers of one host
    # may share either.
    spaces = [os.stat(f"/proc/self/ns/{name}").st_ino for name in ("net", "user")]
    return f"{boot} {spaces} {os.getuid()}"


def listener(address: str) -> socket.socket:
    """A socket to which the higher ranks' ends connect."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(address)
    found.listen()
    return found


def offer(
    listening: socket.socket, timeout: float, look: Callable[[], object] = _at_once
) -> tuple[int, SharedLink]:
    """The lower rank's end for the next process that connects, and the number that this one names."""
    while True:
        connection, _ = _in_time(listening, listening.accept, timeout, look)
        if _same_user(connection):
            break
        connection.close()
    with _closed_where_it_fails(connection):
        connection.settimeout(timeout)
        named = connection.recv(_NUMBER.size, socket.MSG_WAITALL)
        if len(named) < _NUMBER.size:
            raise ConnectionResetError("a peer connected and ended")
        (number,) = _NUMBER.unpack(named)
        descriptor = os.memfd_create("weft", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(descriptor, _BYTES)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
        socket.send_fds(connection, [_WAKE], [descriptor])
        return number, _mapped(connection, descriptor, lower=True)


def connect(
    address: str, number: int, timeout: float, look: Callable[[], object] = _at_once
) -> SharedLink:
    """The higher rank's end: connects to the lower rank's address and names its own number."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with _closed_where_it_fails(connection):
        connection.settimeout(timeout)
        connection.connect(address)
        if not _same_user(connection):
            raise ConnectionError("another user listens where a peer should")
        connection.sendall(_NUMBER.pack(number))
        came, descriptors, _, _ = _in_time(
            connection, lambda: socket.recv_fds(connection, 1, 1), timeout, look
        )
        if not came:
            raise ConnectionResetError("the peer has ended")
        if not descriptors:
            raise ConnectionError("a peer hands over no memory")
        # Check that memory from a peer has the size that both count on, for ever: what shrinks would end who reads it.
        descriptor = descriptors[0]
        try:
            seals = fcntl.fcntl(descriptor, _GET_SEALS)
        except OSError:  # it is no memory, but some file
            seals = 0
        if seals & _SEALS != _SEALS or os.fstat(descriptor).st_size != _BYTES:
            os.close(descriptor)
            raise ConnectionError("a peer shares memory of another size, or whose size may change")
        return _mapped(connection, descriptors[0], lower=False)


@contextmanager
def _closed_where_it_fails(connection: socket.socket) -> Iterator[None]:
    try:
        yield
    except BaseException:
        connection.close()
        raise


def _in_time(
    end: socket.socket, call: Callable[[], T], timeout: float, look: Callable[[], object]
) -> T:
    """Make a call that waits at a socket, and look around every now and then meanwhile."""
    until = time.monotonic() + timeout
    while True:
        end.settimeout(max(0.001, min(LOOK_SECONDS, until - time.monotonic())))
        try:
            return call()
        except TimeoutError:
            look()
            if time.monotonic() >= until:
                raise


def _mapped(connection: socket.socket, descriptor: int, lower: bool) -> SharedLink:
    # For what is sent, the peer leaves but a few bytes unread, so no call waits that should not.
    connection.settimeout(None)
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    return SharedLink(connection, torch.frombuffer(memory, dtype=torch.uint8), memory, lower)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())
