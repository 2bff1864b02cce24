"""The store of a job of several nodes: names with values, like torch's stores, for processes that know the secret of
the run.

A launcher listens at one address. Both ends of a connection prove that they know the secret, and every message carries
a proof of its own: messages can be read on the way, but not made, changed, repeated or left out, as the key of their
proofs holds for one connection and one direction, and they are counted. Messages are data, in JSON; none is read before
it is proven. `multiprocessing.connection` would prove the two ends only, and wait for strangers without end.
"""

from __future__ import annotations

import hmac
import json
import secrets
import socket
import threading
import time
from contextlib import suppress
from datetime import timedelta
from typing import Any, final

from torch.distributed import Store  # type: ignore[attr-defined]

from weft.errors import UserError
from weft.runtime.world.launch import timeout_seconds

# Seconds between two tries to connect, or to let somebody in.
_AGAIN_SECONDS = 0.2
# Seconds that a request may wait in the store; who wants to wait longer asks again.
WAIT_SECONDS = 0.5
# Connections whose other ends have proven nothing yet; where there are more, the oldest one ends.
MOST_UNPROVEN = 64
# The first bytes of both ends; the number tells versions apart.
_HELLO = b"weft-store-2"
# Bytes of a nonce, and of a proof.
_BYTES = 32
# Bytes of a message, at most.
LONGEST = 2**26
# Seconds in which the other end proves itself.
GREETING_SECONDS = 5.0
# Seconds without a sign of the other end's host after which it has gone.
SILENCE_SECONDS = 30.0


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


@final
class AuthenticationFailedError(ConnectionError):
    """The other end does not know the secret."""


def message_mac(secret: bytes, *parts: bytes) -> bytes:
    """The HMAC-SHA256 of parts, each with its length."""
    made = hmac.new(secret, digestmod="sha256")
    for part in parts:
        made.update(len(part).to_bytes(8, "big") + part)
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
        proof = message_mac(self._key, self._sends, b"%d" % self._sent, message)
        self._sent += 1
        self._connection.sendall(len(message).to_bytes(4, "big") + proof + message)

    def receive(self) -> bytes:
        """The next message."""
        head = _received(self._connection, 4 + _BYTES)
        length = int.from_bytes(head[:4], "big")
        if len(head) < 4 + _BYTES:
            raise ConnectionError("the other end has gone")
        if length > LONGEST:
            raise AuthenticationFailedError(f"a message of {length} bytes")
        message = _received(self._connection, length)
        expected = message_mac(self._key, self._hears, b"%d" % self._heard, message)
        if not hmac.compare_digest(head[4:], expected):
            raise AuthenticationFailedError("a message without proof")
        self._heard += 1
        return message

    def close(self) -> None:
        """Close the connection; whoever waits for a message wakes."""
        hang_up(self._connection)
        self._connection.close()


def authenticate(connection: socket.socket, secret: bytes, listens: bool = False) -> ControlChannel:
    """Prove to the other end that this end knows the secret, and have the other end prove the same.

    The end that `listens` proves it second. It may wait for requests as long as it likes: `keep_alive` tells whether
    the other host is there. It answers within a second, so for who connected it has gone after `SILENCE_SECONDS`.
    """
    end = time.monotonic() + GREETING_SECONDS
    connection.settimeout(GREETING_SECONDS)
    own = secrets.token_bytes(_BYTES)
    connection.sendall(_HELLO + own)
    if _received(connection, len(_HELLO), end) != _HELLO:
        raise AuthenticationFailedError("the other end is not a store of weft's")
    theirs = _received(connection, _BYTES, end)
    nonces, ends = (own, theirs), (b"store", b"client")
    if not listens:
        nonces, ends = (theirs, own), (b"client", b"store")
        connection.sendall(message_mac(secret, ends[0], *nonces))
    found = _received(connection, _BYTES, end)
    if not hmac.compare_digest(found, message_mac(secret, ends[1], *nonces)):
        raise AuthenticationFailedError("the other end has another secret")
    if listens:
        connection.sendall(message_mac(secret, ends[0], *nonces))
    connection.settimeout(None if listens else SILENCE_SECONDS)
    return ControlChannel(connection, message_mac(secret, b"key", *nonces), *ends)


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


def hang_up(connection: socket.socket) -> None:
    """End a connection; a thread that waits for its other end wakes."""
    with suppress(OSError):  # the other end was faster
        connection.shutdown(socket.SHUT_RDWR)


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
        self._ask("swap", key, None, _text(value))

    def get(self, key: str, seconds: float | None = None) -> bytes:
        """The value, as soon as it is there, within so many seconds; None for the longest wait."""
        return self._read([key], seconds)[0]

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        self._read(keys, None if timeout is None else timeout.total_seconds())

    def check(self, keys: list[str]) -> bool:
        return self._ask("read", keys, False) is not None

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0; gives the sum."""
        found, expected = "", None
        while found != expected:
            expected, total = found, int(found or 0) + amount
            found = self._ask("swap", key, expected, str(total)) or ""
        return total

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        """Write where the value is the expected one, "" for none; gives what is there then."""
        wanted, found = _text(expected), self._ask("swap", key, _text(expected), _text(desired))
        return _bytes(_text(desired) if (found or "") == wanted else found or wanted)

    def delete_key(self, key: str) -> bool:
        return self._ask("swap", key, None, None) is not None

    def num_keys(self) -> int:
        return int(self._ask("count"))

    def has_extended_api(self) -> bool:
        return False

    def will(self, key: str, value: str | None) -> None:
        """Have a value written, where none is, when this connection ends; None takes that back."""
        self._ask("will", key, value if value is None else _text(value))

    def _read(self, keys: list[str], seconds: float | None) -> list[bytes]:
        seconds = self._seconds if seconds is None else seconds
        end = time.monotonic() + seconds
        while (found := self._ask("read", keys, True)) is None:
            if time.monotonic() > end:
                names = ", ".join(keys)
                raise LateError(f"the store of the job: {names}: not there after {seconds:g} s")
        return list(map(_bytes, found))

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


def _bytes(text: str) -> bytes:
    return text.encode("latin-1")


@final
class Server:
    """The store itself: it listens, with a thread for each connection.

    Args:
        address: host and port to listen at; port 0 chooses one.

    Raises:
        OSError: the address is no one of this host, or taken.
    """

    def __init__(
        self, address: tuple[str, int], secret: bytes, family: int = socket.AF_INET
    ) -> None:
        self._secret = secret
        # Bytes of values stand as characters of Latin-1.
        self._values: dict[str, str] = {}
        self._changed = threading.Condition()
        self._lines: set[ControlChannel] = set()
        self._unproven: list[socket.socket] = []
        self._closed = threading.Event()
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listening.bind(address)
            self._listening.listen(128)
        except OSError:
            self._listening.close()
            raise
        threading.Thread(target=self._accept, name="weft store", daemon=True).start()

    @property
    def port(self) -> int:
        """At which it listens."""
        found: int = self._listening.getsockname()[1]
        return found

    def drain(self, seconds: float) -> None:
        """Wait until all connections have ended, for so many seconds at most."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lines, seconds)

    def close(self) -> None:
        """Listen no more, and end all connections."""
        self._closed.set()
        hang_up(self._listening)  # not all systems wake an accept so
        self._listening.close()
        with self._changed:
            lines, unproven = list(self._lines), list(self._unproven)
        for line in lines:
            line.close()
        for connection in unproven:
            hang_up(connection)

    def _accept(self) -> None:
        """Let everybody in, in a thread each; who knows the secret proves it at once, so of too many the oldest go."""
        while not self._closed.is_set():
            try:
                connection, _ = self._listening.accept()
                self._unproven.append(connection)
                for oldest in self._unproven[:-MOST_UNPROVEN]:
                    hang_up(oldest)
                arguments, name = (connection,), "weft store connection"
                threading.Thread(target=self._serve, args=arguments, name=name, daemon=True).start()
            except (
                OSError
            ):  # who came has gone again, or there are too many files: others may come later
                self._closed.wait(_AGAIN_SECONDS)
            except RuntimeError:  # there are too many threads
                self._unproven.remove(connection)
                connection.close()
                self._closed.wait(_AGAIN_SECONDS)

    def _serve(self, connection: socket.socket) -> None:
        """The life of a connection. The writes that a client left for its end are made however the connection ends."""
        wills: dict[str, str | None] = {}
        try:
            keep_alive(connection)
            line = authenticate(connection, self._secret, listens=True)
        except OSError:
            connection.close()
            return
        finally:
            self._unproven.remove(connection)
        with self._changed:
            self._lines.add(line)
        # It goes, or speaks another version.
        with suppress(OSError, ValueError):
            while True:
                found = self._answer(json.loads(line.receive()), wills)
                line.send(json.dumps(found).encode())
        line.close()
        with self._changed:
            self._lines.discard(line)
            for key, value in wills.items():
                if value is not None:
                    self._values.setdefault(key, value)
            self._changed.notify_all()

    def _answer(self, request: Any, wills: dict[str, str | None]) -> Any:
        """The result of a request.

        read: the values of keys, None if not all are there, after a wait of `WAIT_SECONDS` at most if asked for.
        swap: write, or delete (None), where the value is the expected one ("" for none, None for any); what was there.
        """
        values = self._values
        with self._changed:
            match request:
                case ["read", [*keys], bool(waits)] if all(isinstance(key, str) for key in keys):
                    if waits:
                        self._changed.wait_for(lambda: values.keys() >= set(keys), WAIT_SECONDS)
                    return [values[x] for x in keys] if values.keys() >= set(keys) else None
                case ["swap", str(key), None | str() as expected, None | str() as value]:
                    found = values.get(key)
                    if expected is None or expected == (found or ""):
                        values.pop(key, None)
                        values.update({} if value is None else {key: value})
                        self._changed.notify_all()
                    return found
                case ["will", str(key), None | str() as value]:
                    wills[key] = value
                    return None
                case ["count"]:
                    return len(values)
        raise ValueError(f"{request!r} is not a request")
