"""Entries in the store of a job that carry a proof: who does not know the secret of the run can put nothing there."""

from __future__ import annotations

import hmac
import os
import time
from datetime import timedelta
from typing import Any, final

from weft.runtime.world.nodes.frames import proof
from weft.runtime.world.variables import given_secret, timeout_seconds

# Seconds between two looks at an entry that somebody else has written.
_AGAIN_SECONDS = 0.1
# The name that torchrun gives a run.
_RUN_ID = "TORCHELASTIC_RUN_ID"


def signed(store: Any) -> Any:
    """Weft's own way to use a `torch.distributed.Store`; the store itself where the run has no secret.

    What was written in another run with the same secret proves nothing here, where torchrun gave the runs two names.
    """
    secret = given_secret()
    run = os.environ.get(_RUN_ID, "").encode()
    return SignedStore(store, proof(secret, b"entries", run)) if secret else store


@final
class SignedStore:
    """A store whose values are HMAC-SHA256 of key and value, and the value. What has no such proof is not there."""

    def __init__(self, store: Any, secret: bytes) -> None:
        self._store, self._secret = store, secret
        self._seconds = timeout_seconds()

    def clone(self) -> SignedStore:
        """The same over a connection of its own."""
        return SignedStore(self._store.clone(), self._secret)

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the longest wait of `get`."""
        self._seconds = timeout.total_seconds()
        self._store.set_timeout(timeout)

    def set(self, key: str, text: str) -> None:
        """Write a value."""
        self._store.set(key, self._sign(key, text))

    def get(self, key: str) -> bytes:
        """The value, once it is there.

        Raises:
            RuntimeError: it is not there in time, or the store has gone.
        """
        end = time.monotonic() + self._seconds
        while (found := self._proven(key, self._store.get(key))) is None:
            if time.monotonic() > end:
                raise RuntimeError(f"{key} holds what nobody of this job has written")
            time.sleep(_AGAIN_SECONDS)
        return found

    def check(self, keys: list[str]) -> bool:
        """True where all are there."""
        return self._store.check(keys) and all(
            self._proven(key, self._store.get(key)) is not None for key in keys
        )

    def compare_set(self, key: str, expected: str, text: str) -> None:
        """Write a value where there is none; `expected` is ""."""
        made = self._sign(key, text)
        found = bytes(self._store.compare_set(key, expected, made))
        while found != made.encode() and self._proven(key, found) is None:
            again = bytes(self._store.compare_set(key, found.decode("latin-1"), made))
            if again == found:  # no text, which cannot be compared
                self._store.set(key, made)
                return
            found = again

    def _sign(self, key: str, text: str) -> str:
        return f"{self._proof(key, text)} {text}"

    def _proof(self, key: str, text: str) -> str:
        return hmac.new(self._secret, f"{len(key)} {key} {text}".encode(), "sha256").hexdigest()

    def _proven(self, key: str, value: bytes) -> bytes | None:
        """The text that was written under a key, where it carries the proof; None elsewhere."""
        sign, _, text = bytes(value).partition(b" ")
        try:
            expected = self._proof(key, text.decode())
        except UnicodeDecodeError:
            return None
        return text if hmac.compare_digest(sign, expected.encode()) else None
