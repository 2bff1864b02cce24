"""Connections between those who know a secret: both ends prove it, and every message carries a proof of its own.

Nothing is interpreted before it is proven. Messages can be read on the way, but not made, changed, repeated or
left out: the key of their proofs holds for one connection and one direction, and they are counted. The secret
itself is never sent.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
import time
from contextlib import suppress
from typing import final

# What a weft store says first; the number tells versions apart.
_HELLO = b"weft-store-1"
_NONCE = 32
_PROOF = 32
_LENGTH = struct.Struct("!I")
_COUNT = struct.Struct("!Q")
# Bytes of a message, at most.
LONGEST = 2**26
# Seconds in which the other end proves itself.
GREETING_SECONDS = 5.0
# Seconds without a sign of the other end's host after which it has gone.
SILENCE_SECONDS = 30.0


@final
class AuthenticationFailedError(ConnectionError):
    """The other end does not know the secret."""


def message_mac(secret: bytes, *parts: bytes) -> bytes:
    """The HMAC-SHA256 of parts, each with its length."""
    made = hmac.new(secret, digestmod="sha256")
    for part in parts:
        made.update(_COUNT.pack(len(part)) + part)
    return made.digest()


@final
class ControlChannel:
    """One end of a connection whose other end has proven itself."""

    def __init__(self, connection: socket.socket, key: bytes, sends: bytes, hears: bytes) -> None:
        self._connection = connection
        self._key, self._sends, self._hears = key, sends, hears
        self._sent = self._heard = 0

    def send(self, message: bytes) -> None:
        """Send a message of at most `LONGEST` bytes."""
        if len(message) > LONGEST:
            raise ValueError(f"a message of {len(message)} bytes; {LONGEST} is the most")
        sign = message_mac(self._key, self._sends, _COUNT.pack(self._sent), message)
        self._sent += 1
        self._connection.sendall(_LENGTH.pack(len(message)) + sign + message)

    def receive(self) -> bytes:
        """The next message."""
        (length,) = _LENGTH.unpack(_exactly(self._connection, _LENGTH.size))
        if length > LONGEST:
            raise AuthenticationFailedError(f"a message of {length} bytes")
        sign = _exactly(self._connection, _PROOF)
        message = _exactly(self._connection, length)
        expected = message_mac(self._key, self._hears, _COUNT.pack(self._heard), message)
        if not hmac.compare_digest(sign, expected):
            raise AuthenticationFailedError("a message without proof")
        self._heard += 1
        return message

    def close(self) -> None:
        """Close the connection; whoever waits for a message wakes."""
        with suppress(OSError):  # the other end was faster
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()


def authenticate(connection: socket.socket, secret: bytes) -> ControlChannel:
    """Prove to the one who listens that this end knows the secret, and have it prove the same.

    Who listens answers what it is asked within a second; where it says nothing for `SILENCE_SECONDS`, it has gone.
    """
    end = time.monotonic() + GREETING_SECONDS
    if _exactly(connection, len(_HELLO), end) != _HELLO:
        raise AuthenticationFailedError("who listens there is no store of weft's")
    theirs, own = _exactly(connection, _NONCE, end), secrets.token_bytes(_NONCE)
    connection.sendall(own + message_mac(secret, b"client", theirs, own))
    found = _received(connection, _PROOF, end)
    if not hmac.compare_digest(found, message_mac(secret, b"server", theirs, own)):
        raise AuthenticationFailedError("who listens there has another secret")
    connection.settimeout(SILENCE_SECONDS)
    return ControlChannel(
        connection, message_mac(secret, b"key", theirs, own), b"to server", b"to client"
    )


def answer(connection: socket.socket, secret: bytes) -> ControlChannel:
    """Let an end that connected prove that it knows the secret, then prove the same to it.

    It may say nothing for as long as it likes: `keep_alive` tells whether its host is there.
    """
    end = time.monotonic() + GREETING_SECONDS
    connection.settimeout(GREETING_SECONDS)
    own = secrets.token_bytes(_NONCE)
    connection.sendall(_HELLO + own)
    theirs = _exactly(connection, _NONCE, end)
    sign = _exactly(connection, _PROOF, end)
    if not hmac.compare_digest(sign, message_mac(secret, b"client", own, theirs)):
        raise AuthenticationFailedError("who connected has another secret")
    connection.sendall(message_mac(secret, b"server", own, theirs))
    connection.settimeout(None)
    return ControlChannel(
        connection, message_mac(secret, b"key", own, theirs), b"to client", b"to server"
    )


def keep_alive(connection: socket.socket) -> None:
    """Have the system end a TCP connection whose other host has not answered it for `SILENCE_SECONDS`.

    A host that loses power says no good-bye.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probes = 3
    pause = int(SILENCE_SECONDS / (probes + 1))
    options = {
        "TCP_KEEPIDLE": pause,
        "TCP_KEEPINTVL": pause,
        "TCP_KEEPCNT": probes,
        # Of what was sent and not acknowledged, in milliseconds.
        "TCP_USER_TIMEOUT": int(SILENCE_SECONDS * 1000),
    }
    for name, value in options.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


def _exactly(connection: socket.socket, count: int, end: float | None = None) -> bytes:
    found = _received(connection, count, end)
    if len(found) < count:
        raise ConnectionError("the other end has gone")
    return found


def _received(connection: socket.socket, count: int, end: float | None = None) -> bytes:
    """So many bytes, or fewer where the other end has gone; TimeoutError where they are not there at `end`."""
    parts = bytearray()
    while len(parts) < count:
        if end is not None:  # 0 would mean not to wait, which is another error
            connection.settimeout(max(end - time.monotonic(), 1e-3))
        part = connection.recv(min(count - len(parts), 2**16))
        if not part:
            break
        parts += part
    return bytes(parts)
