"""The store of a job of several nodes, as torch has stores, for who knows the secret of the run."""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import struct
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

from torch.distributed import Store  # type: ignore[attr-defined]

from weft.errors import UserError
from weft.runtime.world.launch import timeout_seconds

# Seconds between two tries to connect.
_AGAIN_SECONDS = 0.2


def split_address(text: str) -> tuple[str, int]:
    """Host and port of "host:port"; "[::1]:29400" for IPv6.

    Raises:
        UserError: it is something else.
    """
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or not 0 < int(port[:6]) < 2**16:
        raise UserError(
            f"the nodes meet at host:port, got {text!r}; give one of their addresses, as 10.0.0.1:29400"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


@final
class StoreError(RuntimeError, ConnectionError):
    """The store has gone, or does not answer: its host may have lost power. torch's stores raise RuntimeErrors."""


@final
class LateError(RuntimeError, TimeoutError):
    """A value is not there in time."""


# torch holds the C++ half of a store only; this half must live as long.
_made: list[Store] = []


@final
class NodesStore(Store):
    """A connection to the store; one thread at a time uses it, and none holds it while it waits long.

    All methods raise `StoreError` where the store has gone; those that wait, `LateError`.

    Args:
        address: "host:port".
        seconds: to wait for the store to be there.

    Raises:
        TimeoutError: it was not.
        UserError: who listens there has another secret.
    """

    def __init__(self, address: str, secret: bytes, seconds: float) -> None:
        super().__init__()
        self.address, self._secret = address, secret
        self._lock = threading.Lock()
        place, end = split_address(address), time.monotonic() + seconds
        while True:
            try:
                connection = socket.create_connection(place, timeout=max(1.0, seconds))
                break
            except OSError as error:
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"nobody listens at {address} after {seconds:g} s ({error}); start weft run on the "
                        "node that has this address too, and let no firewall stand between"
                    ) from error
                time.sleep(_AGAIN_SECONDS)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.local: str = connection.getsockname()[0]
        try:
            self._line = authenticate(connection, secret)
        except OSError as error:
            connection.close()
            if not isinstance(error, AuthenticationFailedError):
                raise
            raise UserError(
                f"{address}: {error}; set WEFT_SECRET to the same value on all nodes, and give them the same --run-id"
            ) from error
        self._seconds = timeout_seconds()
        _made.append(self)

    def clone(self) -> NodesStore:
        """One more connection to the same store."""
        return NodesStore(self.address, self._secret, 5.0)

    def close(self) -> None:
        """End the connection."""
        self._line.close()

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """The longest wait of `get` and `wait`."""
        return timedelta(seconds=self._seconds)

    def set(self, key: str, value: str | bytes) -> None:
        self._ask("set", key, _text(value))

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """The value, as soon as it is there, within so many seconds; None for the longest wait."""
        seconds = self._seconds if seconds is None else seconds
        end = time.monotonic() + seconds
        while (found := self._ask("get", key)) is None:
            if time.monotonic() > end:
                raise LateError(f"the store of the job: {key} is not there after {seconds:g} s")
        return bytes(found.encode("latin-1"))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        end = time.monotonic() + seconds
        while not self._ask("wait", keys):
            if time.monotonic() > end:
                raise LateError(
                    f"the store of the job: {', '.join(keys)} are not there after {seconds:g} s"
                )

    def check(self, keys: list[str]) -> bool:
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0; gives the sum."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write where the value is the expected one, "" for none; gives what is there then."""
        found = self._ask("compare_set", key, _text(expected), _text(desired))
        return bytes(found.encode("latin-1"))

    def delete_key(self, key: str) -> bool:
        return bool(self._ask("delete", key))

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def has_extended_api(self) -> bool:
        return False

    def will(self, key: str, value: str | None) -> None:
        """Have a value written, where none is, when this connection ends; None takes that back."""
        self._ask("will", key, None if value is None else _text(value))

    def _ask(self, *request: Any) -> Any:
        message = json.dumps(request).encode()
        with self._lock:
            try:
                self._line.send(message)
                return json.loads(self._line.receive())
            except TimeoutError as error:
                self._line.close()  # what comes late would be taken for the next answer
                raise StoreError(
                    f"the store of the job at {self.address} has not answered for {SILENCE_SECONDS:g} s"
                ) from error
            except OSError as error:
                raise StoreError(f"the store of the job at {self.address}: {error}") from error


def _text(value: str | bytes) -> str:
    return (value.encode() if isinstance(value, str) else value).decode("latin-1")


# Connections between those who know a secret: both ends prove it, and every message carries a proof of its own.
#
# Nothing is interpreted before it is proven. Messages can be read on the way, but not made, changed, repeated or
# left out: the key of their proofs holds for one connection and one direction, and they are counted. The secret
# itself is never sent.


# The first bytes of a weft store; the number tells versions apart.
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
        # For what was sent and not acknowledged, in milliseconds.
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
