"""Entries that others write into a job's store: they are not there for the job, and do not stand in its way."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from weft.errors import UserError
from weft.runtime.failures.failure_store import FailureStore, failure_key
from weft.runtime.world.launch import SECRET
from weft.runtime.world.rendezvous import SignedStore, signed

OWN = b"of this run only, and long enough"


@pytest.fixture
def store() -> HashStore:
    return HashStore()


def test_what_the_job_writes_is_there(store: HashStore) -> None:
    one, other = SignedStore(store, OWN), SignedStore(store, OWN).clone()
    one.set("key", "some text é")
    assert other.check(["key"])
    assert other.get("key").decode() == "some text é"
    assert OWN not in store.get("key")


@pytest.mark.parametrize("value", ["", "text", f"{'0' * 64} text", b"\xff\xfe", "é"])
def test_what_others_write_is_not_there(store: HashStore, value: str | bytes) -> None:
    mine = SignedStore(store, OWN)
    mine.set_timeout(timedelta(0))
    store.set("key", value)
    assert not mine.check(["key"])
    with pytest.raises(RuntimeError, match="nobody of this job"):
        mine.get("key")


def test_nor_is_what_was_written_with_another_secret_or_under_another_name(
    store: HashStore,
) -> None:
    mine, theirs = SignedStore(store, OWN), SignedStore(store, b"another")
    theirs.set("key", "text")
    assert not mine.check(["key"])
    mine.set("one", "text")
    store.set("other", store.get("one"))
    assert mine.check(["one"])
    assert not mine.check(["other"])


@pytest.mark.parametrize("planted", ["1 RuntimeError: planted", b"\xff\xfe", ""])
def test_nobody_but_the_job_ends_it(store: HashStore, planted: str | bytes) -> None:
    mine = SignedStore(store, OWN)
    store.set(failure_key(0, 0), planted)
    board = FailureStore(mine, 0, 2)
    heard = threading.Event()
    board.watch(lambda _: heard.set())
    assert board.cause(0.3) is None
    assert not board.failed
    # A true failure is still told.
    other = FailureStore(mine, 1, 2)
    other.announce(ValueError("true"))
    assert "ValueError: true" in str(board.cause(5))
    assert heard.wait(5)
    board.close()
    other.close()


def test_what_was_told_first_stays(store: HashStore) -> None:
    mine = SignedStore(store, OWN)
    mine.compare_set("key", "", "first")
    mine.compare_set("key", "", "second")
    assert mine.get("key") == b"first"


def test_the_secret_comes_from_the_environment(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(SECRET, raising=False)
    assert signed(store) is store
    monkeypatch.setenv(SECRET, OWN.decode())
    assert isinstance(signed(store), SignedStore)
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(UserError, match="16 or more"):
        signed(store)


def test_what_an_earlier_run_has_written_is_not_there(
    store: HashStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has another name under torchrun, and may have had the same secret."""
    monkeypatch.setenv(SECRET, OWN.decode())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "first")
    signed(store).set("key", "text")
    assert signed(store).check(["key"])
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "second")
    assert not signed(store).check(["key"])
