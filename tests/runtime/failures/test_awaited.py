"""Entries of other ranks are waited for as long as those live, and as the ranks go on together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import pytest
from torch.distributed import HashStore  # type: ignore[attr-defined]

from weft.errors import NoAnswer
from weft.runtime.failures.awaited import Entries, begin_waits, end_waits
from weft.runtime.failures.board import PeerFailure

pytestmark = pytest.mark.timeout(30)


@pytest.fixture(autouse=True)
def going_on() -> Iterator[None]:
    yield
    begin_waits()


def entries(gone: Callable[[int], bool] = lambda _: False, seconds: float = 20.0) -> Entries:
    return Entries(HashStore(), 0, gone, seconds)


def test_an_entry_is_read_although_its_rank_has_ended() -> None:
    found = entries(lambda _: True)
    found.write("a/1", "text")
    assert found.read("a/1", 1, "the others") == "text"


def test_a_rank_that_has_ended_or_is_late_is_named() -> None:
    with pytest.raises(
        NoAnswer,
        match=r"rank 2 has ended before it came to the others: rank 0 waits .*awaited\.py:\d",
    ):
        entries(lambda rank: rank == 2).wait({1: "a/1", 2: "a/2"}, "the others")
    with pytest.raises(NoAnswer, match="rank 1 did not come within 0 s to the others: rank 0"):
        entries(seconds=0.0).read("a/1", 1, "the others")


def test_a_wait_ends_once_the_ranks_do_not_go_on_together() -> None:
    waiting, ended = threading.Event(), list[BaseException]()

    def gone(_: int) -> bool:
        waiting.set()
        return False

    def wait() -> None:
        try:
            entries(gone).read("a/1", 1, "the others")
        except PeerFailure as error:
            ended.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert waiting.wait(10)
    end_waits(PeerFailure("rank 1 is lost"))
    end_waits(PeerFailure("rank 2 is lost"))
    thread.join(10)
    assert [str(each) for each in ended] == ["rank 1 is lost"]
    # And one that begins later, as a world that was being made goes from one to the next.
    with pytest.raises(PeerFailure, match="rank 1 is lost"):
        entries().look([1], "the others")
    begin_waits()
    entries().look([1], "the others")
