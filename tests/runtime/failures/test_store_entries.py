"""Entries of other ranks are waited for as long as those live."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from weft.errors import NoAnswer
from weft.runtime.failures.failure_store import StoreEntries

pytestmark = pytest.mark.timeout(30)


def entries(gone: Callable[[int], bool] = lambda _: False, seconds: float = 20.0) -> StoreEntries:
    return StoreEntries(HashStore(), 0, gone, seconds)


def test_an_entry_is_read_although_its_rank_has_ended() -> None:
    found = entries(lambda _: True)
    found.write("a/1", "text")
    assert found.read("a/1", 1, "the others") == "text"


def test_a_rank_that_has_ended_or_is_late_is_named() -> None:
    with pytest.raises(
        NoAnswer,
        match=r"rank 2 has ended before it came to the others: rank 0 waits .*store_entries\.py:\d",
    ):
        entries(lambda rank: rank == 2).wait({1: "a/1", 2: "a/2"}, "the others")
    with pytest.raises(NoAnswer, match="rank 1 did not come within 0 s to the others: rank 0"):
        entries(seconds=0.0).read("a/1", 1, "the others")
