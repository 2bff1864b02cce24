"""Two processes of one host: a piece of memory that both map, and a socket over which they wake each other.

The memory has no name (`memfd_create`) and is handed over through the socket, so nothing is left
behind however a process ends, and an end that closes is seen at once by the other. A process that
waits sleeps in the kernel and burns no core.
"""

from __future__ import annotations

import mmap
import os
import socket
import struct
import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from weft.errors import InternalError

# Each direction has so many slots: while one is filled, others are read.
SLOTS = 4
SLOT_BYTES = 2**19
# Before the bytes of a slot stands their number.
_NUMBER = struct.Struct("q")
_LINE = 64
_STRIDE = _LINE + SLOT_BYTES
# Before the slots, what each end has sent and received so far: two counts for the lower rank's end, two
# for the other's.
_SLOTS_START = 4 * _LINE
_BYTES = _SLOTS_START + 2 * SLOTS * _STRIDE
_WAKE = b"."

# Does something with a place in a tensor and the bytes that came for it, both uint8.
Take = Callable[[Tensor, Tensor], object]


@dataclass
class SharedLink:
    """One process's end.

    Attributes:
        socket: stream to the peer; a byte means that the counts have changed.
        memory, numbers: the mapped memory, as a tensor of bytes and as a buffer.
        lower: whether this is the end of the lower rank, which writes into the first half.
        outgoing: chunks still to be sent in this exchange, at most `SLOT_BYTES` each.
        incoming: places of chunks still to be received.
        take: what is done with them.
        in_place: whether places are sent from, too: none is taken before it was sent.
        sent, received: chunks since the beginning.
        peer_sent, peer_received: the same of the peer, as last looked up.
        closed: whether the peer has gone; what it sent before can still be received.
    """

    socket: socket.socket
    memory: Tensor
    numbers: mmap.mmap
    lower: bool
    outgoing: deque[Tensor] = field(default_factory=deque)
    incoming: deque[Tensor] = field(default_factory=deque)
    take: Take = Tensor.copy_
    in_place: bool = False
    sent: int = 0
    received: int = 0
    peer_sent: int = 0
    peer_received: int = 0
    closed: bool = False

    @property
    def busy(self) -> bool:
        """Whether something is left to send or to receive."""
        return bool(self.outgoing or self.incoming)

    def begin(
        self,
        sends: Iterable[Tensor],
        receives: Iterable[Tensor],
        take: Take = Tensor.copy_,
        in_place: bool = False,
    ) -> None:
        """Begin an exchange of contiguous tensors; the one before must be over."""
        self.outgoing.extend(_chunks(sends))
        self.incoming.extend(_chunks(receives))
        self.take, self.in_place = take, in_place

    def advance(self) -> None:
        """Fill and empty all slots that can be, and wake the peer.

        Raises:
            ConnectionError: the peer has gone, and something is left to do.
        """
        before = self.sent + self.received
        while self.outgoing and self.sent - self.peer_received < SLOTS:
            self._send(self.outgoing.popleft())
        while self.incoming and self.received < self.peer_sent and self._may_take():
            self._receive(self.incoming.popleft())
        if self.sent + self.received > before:
            self._tell()
        if self.closed and self.busy:
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
        return not self.in_place or len(self.incoming) > len(self.outgoing)

    def _send(self, chunk: Tensor) -> None:
        start, size = self._slot(self.sent, own=True), chunk.numel()
        _NUMBER.pack_into(self.numbers, start, size)
        start += _LINE
        self.memory[start : start + size].copy_(chunk)
        self.sent += 1

    def _receive(self, place: Tensor) -> None:
        start = self._slot(self.received, own=False)
        (size,) = _NUMBER.unpack_from(self.numbers, start)
        if size != place.numel():
            raise InternalError(
                f"a peer sends {size} bytes where {place.numel()} are expected: the ranks run "
                "different plans"
            )
        start += _LINE
        self.take(place, self.memory[start : start + size])
        self.received += 1

    def _tell(self) -> None:
        """Write this end's counts, then wake the peer: it looks at them afterwards."""
        _NUMBER.pack_into(self.numbers, self._line(0, own=True), self.sent)
        _NUMBER.pack_into(self.numbers, self._line(1, own=True), self.received)
        with suppress(OSError):  # it has gone: `listen` will notice
            self.socket.sendall(_WAKE)

    def _count(self, which: int, own: bool) -> int:
        count: int = _NUMBER.unpack_from(self.numbers, self._line(which, own))[0]
        return count

    def _line(self, which: int, own: bool) -> int:
        return (which + (0 if own == self.lower else 2)) * _LINE

    def _slot(self, number: int, own: bool) -> int:
        half = 0 if own == self.lower else SLOTS
        return _SLOTS_START + (half + number % SLOTS) * _STRIDE


def _chunks(tensors: Iterable[Tensor]) -> Iterator[Tensor]:
    for tensor in tensors:
        if tensor.numel():
            data = tensor.detach().view(-1).view(torch.uint8)
            for start in range(0, data.numel(), SLOT_BYTES):
                yield data[start : start + SLOT_BYTES]


def host() -> str:
    """What processes have in common that can be linked; "" where the system offers no such links."""
    if sys.platform != "linux" or not hasattr(os, "memfd_create"):
        return ""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Sockets without a file name belong to a network namespace.
    return f"{boot} {os.stat('/proc/self/ns/net').st_ino} {os.getuid()}"


def listener(address: str) -> socket.socket:
    """A socket to which the higher ranks' ends connect."""
    found = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    found.bind(address)
    found.listen()
    return found


def offer(listening: socket.socket, timeout: float) -> tuple[int, SharedLink]:
    """The lower rank's end for the next process that connects, and the number that this one names."""
    listening.settimeout(timeout)
    while True:
        connection, _ = listening.accept()
        if _same_user(connection):
            break
        connection.close()
    connection.settimeout(timeout)
    (number,) = _NUMBER.unpack(connection.recv(_NUMBER.size, socket.MSG_WAITALL))
    descriptor = os.memfd_create("weft")
    os.ftruncate(descriptor, _BYTES)
    socket.send_fds(connection, [_WAKE], [descriptor])
    return number, _mapped(connection, descriptor, lower=True)


def connect(address: str, number: int, timeout: float) -> SharedLink:
    """The higher rank's end: connects to the lower rank's address and names its own number."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.settimeout(timeout)
    connection.connect(address)
    connection.sendall(_NUMBER.pack(number))
    _, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
    return _mapped(connection, descriptors[0], lower=False)


def _mapped(connection: socket.socket, descriptor: int, lower: bool) -> SharedLink:
    try:
        memory = mmap.mmap(descriptor, 0)
    finally:
        os.close(descriptor)
    return SharedLink(connection, torch.frombuffer(memory, dtype=torch.uint8), memory, lower)


def _same_user(connection: socket.socket) -> bool:
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    _, user, _ = struct.unpack("3i", credentials)
    return bool(user == os.getuid())
