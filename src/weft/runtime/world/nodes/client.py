"""One who uses the store of a job of several nodes; and that store as torch has stores."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar, final

from torch.distributed import Store  # type: ignore[attr-defined]

from weft.errors import UserError
from weft.runtime.world.nodes.frames import SILENCE_SECONDS, NotProvenError, greet
from weft.runtime.world.variables import timeout_seconds

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
            f"the nodes meet at host:port, found {text!r}; give one of their addresses, as 10.0.0.1:29400"
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


@final
class Client:
    """A connection to the store; one thread at a time uses it, and none holds it while it waits long.

    Args:
        address: "host:port".
        seconds: to wait for the store to be there.

    Raises:
        TimeoutError: it was not.
        UserError: who listens there has another secret.
    """

    def __init__(self, address: str, secret: bytes, seconds: float) -> None:
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
            self._line = greet(connection, secret)
        except OSError as error:
            connection.close()
            if not isinstance(error, NotProvenError):
                raise
            raise UserError(
                f"{address}: {error}; set WEFT_SECRET to the same value on all nodes, and give them the same --run-id"
            ) from error

    def another(self) -> Client:
        """One more connection to the same store."""
        return Client(self.address, self._secret, 5.0)

    def set(self, key: str, value: bytes) -> None:
        """Write a value."""
        self._ask("set", key, value.decode("latin-1"))

    def get(self, key: str, seconds: float) -> bytes:
        """The value, as soon as it is there.

        Raises:
            TimeoutError: it is not there after so many seconds.
        """
        end = time.monotonic() + seconds
        while (found := self._ask("get", key)) is None:
            if time.monotonic() > end:
                raise TimeoutError(f"{key} is not there after {seconds:g} s")
        return bytes(found.encode("latin-1"))

    def wait(self, keys: list[str], seconds: float) -> None:
        """Wait until all are there.

        Raises:
            TimeoutError: they are not after so many seconds.
        """
        end = time.monotonic() + seconds
        while not self._ask("wait", keys):
            if time.monotonic() > end:
                raise TimeoutError(f"{', '.join(keys)} are not there after {seconds:g} s")

    def check(self, keys: list[str]) -> bool:
        """True where all are there."""
        return bool(self._ask("check", keys))

    def add(self, key: str, amount: int) -> int:
        """Add to a number that begins at 0; gives the sum."""
        return int(self._ask("add", key, amount))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """Write where the value is the expected one, b"" for none; gives what is there then."""
        texts = expected.decode("latin-1"), desired.decode("latin-1")
        return bytes(self._ask("compare_set", key, *texts).encode("latin-1"))

    def delete(self, key: str) -> bool:
        """Take a value away; False where there was none."""
        return bool(self._ask("delete", key))

    def count(self) -> int:
        """The number of values."""
        return int(self._ask("count"))

    def will(self, key: str, value: bytes | None) -> None:
        """Have a value written, where none is, when this connection ends; None takes that back."""
        self._ask("will", key, None if value is None else value.decode("latin-1"))

    def close(self) -> None:
        """End the connection."""
        self._line.close()

    def _ask(self, *request: Any) -> Any:
        """Raises ConnectionError where the store has gone, or does not answer: its host may have lost power."""
        message = json.dumps(request).encode()
        with self._lock:
            try:
                self._line.send(message)
                return json.loads(self._line.receive())
            except TimeoutError as error:
                self._line.close()  # what comes late would be taken for the next answer
                raise ConnectionError(
                    f"{self.address} has not answered for {SILENCE_SECONDS:g} s"
                ) from error


T = TypeVar("T")

# torch holds the C++ half of a store only; this half must live as long.
_made: list[Store] = []


@final
class NodesStore(Store):
    """A `torch.distributed.Store` over a connection to weft's own."""

    def __init__(self, client: Client) -> None:
        super().__init__()
        self._client = client
        self._seconds = timeout_seconds()
        _made.append(self)

    def close(self) -> None:
        """End the connection."""
        self._client.close()

    def clone(self) -> NodesStore:
        return NodesStore(self._client.another())

    def set_timeout(self, timeout: timedelta) -> None:
        self._seconds = timeout.total_seconds()

    @property
    def timeout(self) -> timedelta:
        """The longest wait of `get` and `wait`."""
        return timedelta(seconds=self._seconds)

    def set(self, key: str, value: str | bytes) -> None:
        _told(lambda: self._client.set(key, _bytes(value)))

    def get(self, key: str) -> bytes:
        return _told(lambda: self._client.get(key, self._seconds))

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        seconds = self._seconds if timeout is None else timeout.total_seconds()
        _told(lambda: self._client.wait(keys, seconds))

    def check(self, keys: list[str]) -> bool:
        return _told(lambda: self._client.check(keys))

    def add(self, key: str, amount: int) -> int:
        return _told(lambda: self._client.add(key, amount))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return _told(lambda: self._client.compare_set(key, _bytes(expected), _bytes(desired)))

    def delete_key(self, key: str) -> bool:
        return _told(lambda: self._client.delete(key))

    def num_keys(self) -> int:
        return _told(self._client.count)

    def has_extended_api(self) -> bool:
        return False


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value


def _told(call: Callable[[], T]) -> T:
    """The result of a call; its errors are those of torch's stores."""
    try:
        return call()
    except OSError as error:
        raise RuntimeError(f"the store of the job: {error}") from error
