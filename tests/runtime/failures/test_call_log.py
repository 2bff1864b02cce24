"""Chains of calls and stamps: where two ranks part, and what they are told."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from weft.errors import RankFailure
from weft.runtime.failures.call_log import (
    CallLog,
    PostedCalls,
    StepChecksum,
    check_step_checksum,
    looking,
)


def calls(*texts: str) -> CallLog:
    made = CallLog()
    for text in texts:
        made.enter(text)
    return made


class Board:
    """What two ranks post."""

    def __init__(self) -> None:
        self.texts: dict[str, str] = {}
        self.announced: list[BaseException] = []

    def post(self, text: str) -> None:
        self.texts["own"] = text

    def posted(self, rank: int) -> str:
        return self.texts.get("peer", "")

    def announce(self, error: BaseException) -> None:
        self.announced.append(error)


@pytest.mark.parametrize(
    ("own", "peer", "parted"),
    [
        (["a", "b"], ["a", "b"], None),
        (["a", "b"], ["a"], None),  # the other one is late
        (["a"], ["a", "b", "c"], None),
        (["a", "b"], ["a", "c"], ("b", "c")),
        (["a", "b", "c"], ["a", "c"], ("b", "c")),
        (["b"] * 50, ["a"] + ["b"] * 49, ("b", "b")),  # long ago: only the checksums tell
        ([], ["a"], None),
    ],
)
def test_where_calls_part(own: list[str], peer: list[str], parted: tuple[str, str] | None) -> None:
    found = calls(*own).parted(calls(*peer).posted(), 0, 1)
    assert (found and (found[0].text, found[1].text)) == parted


def eager(made: CallLog, count: int, waits: bool, *ranks: int) -> CallLog:
    """Has begun so many collectives of eager code, and waits in the last of them."""
    made.begun[ranks] = count
    if waits:
        made.wait_for(ranks, "eager")
    return made


@pytest.mark.parametrize(
    ("own", "peer", "parted"),
    [
        # One waits in eager code, and the other has called something else in place of it.
        (eager(calls("a"), 3, True, 0, 1), eager(calls("a", "b"), 2, False, 0, 1), ("eager", "b")),
        (eager(calls("a", "b"), 2, False, 0, 1), eager(calls("a"), 3, True, 0, 1), ("b", "eager")),
        (eager(calls("a"), 1, True, 0, 1), calls("a", "b"), ("eager", "b")),
        # It is in the same call, or late, and may still come.
        (eager(calls("a"), 3, True, 0, 1), eager(calls("a"), 2, False, 0, 1), None),
        (eager(calls("a", "b"), 3, True, 0, 1), eager(calls("a"), 2, False, 0, 1), None),
        # It has come, and what is posted is old.
        (eager(calls("a"), 3, True, 0, 1), eager(calls("a", "b"), 3, False, 0, 1), None),
        (eager(calls("a", "b"), 4, False, 0, 1), eager(calls("a"), 3, True, 0, 1), None),
        # It need not come.
        (eager(calls("a"), 3, True, 0, 2), calls("a", "b"), None),
        (calls("a", "b"), eager(calls("a"), 3, True, 1, 2), None),
    ],
)
def test_where_eager_code_parts_from_calls(
    own: CallLog, peer: CallLog, parted: tuple[str, str] | None
) -> None:
    found = own.parted(PostedCalls.parse(str(peer.posted())), 0, 1)
    assert (found and (found[0].text, found[1].text)) == parted


def test_eager_code_of_another_thread_comes_in_no_order() -> None:
    made = calls("a")
    thread = threading.Thread(target=eager, args=(made, 1, True, 0, 1))
    thread.start()
    thread.join(10)
    assert made.parted(calls("a", "b").posted(), 0, 1) is None


def test_a_call_knows_the_users_line() -> None:
    made = calls("a")
    assert Path(made.last.file).name == Path(__file__).name
    assert f"{Path(__file__).name}:" in str(made.last)


def test_a_rank_that_waits_tells_both_calls() -> None:
    board = Board()
    look = looking(calls("compile", "step 0"), board, 0, (0, 1))  # type: ignore[arg-type]
    look()
    board.texts["peer"] = str(calls("compile").posted())
    look()
    assert not board.announced
    board.texts["peer"] = str(calls("compile", "full_state_dict").posted())
    with pytest.raises(RankFailure, match=r"rank 0 is in step 0 \(.*rank 1 in full_state_dict"):
        look()
    assert len(board.announced) == 1


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (StepChecksum(1, 2, 3, 5), "make different calls"),
        (StepChecksum(1, 2, 4, 4), "different hyperparameters"),
        (StepChecksum(1, 3, 3, 4), "other values into the live model"),
        (StepChecksum(2, 2, 3, 4), "different batches"),
        (StepChecksum(2, 3, 4, 5), "make different calls"),
    ],
)
def test_what_stamps_tell(other: StepChecksum, words: str) -> None:
    own = StepChecksum(1, 2, 3, 4)
    with pytest.raises(RankFailure, match=f"rank 5 .*{words}|{words}.*rank 5"):
        check_step_checksum(int(own), int(other), 5)
    check_step_checksum(int(own), int(own), 5)
    check_step_checksum(int(own), 0, 5)  # a message without one


def test_a_stamp_fits_a_number_of_eight_bytes() -> None:
    assert 0 < int(StepChecksum(0, 0, 0, 0)) < 2**63
    assert 0 < int(StepChecksum(2**40, 2**40, 2**40, 2**40)) < 2**63
