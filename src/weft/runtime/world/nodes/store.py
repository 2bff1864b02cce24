"""The store of a job of several nodes, as torch takes it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import TypeVar, final

from torch.distributed import Store  # type: ignore[attr-defined]

from weft.runtime.world.nodes.client import Client
from weft.runtime.world.variables import timeout_seconds

T = TypeVar("T")

# torch holds the C++ half of a store only; this half must live as long.
_made: list[Store] = []


@final
class NodesStore(Store):
    """A `torch.distributed.Store` over a connection to weft's own.

    Args:
        client: the connection.
    """

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
