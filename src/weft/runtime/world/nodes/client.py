"""The store of a job of several nodes, as torch has stores, for who knows the secret of the run."""

from __future__ import annotations

import json
import socket
import threading
import time
from datetime import timedelta
from typing import Any, final

from torch.distributed import Store  # type: ignore[attr-defined]

from weft.errors import UserError
from weft.runtime.world.environment_variables import timeout_seconds
from weft.runtime.world.nodes.control_channel import (
    SILENCE_SECONDS,
    AuthenticationFailedError,
    authenticate,
)

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
