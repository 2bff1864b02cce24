"""Communicators of threads: what members are told of one that fails, or that does not come."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from weft.errors import RankFailure
from weft.runtime.channels.local import LocalGroup
from weft.runtime.failures.failure_store import PeerFailure

RANKS = (4, 6, 9)


def all_members(group: LocalGroup, work: Callable[[int], object]) -> list[BaseException | None]:
    """What each member of a group raises at `work(index)`, run at once."""
    with ThreadPoolExecutor(len(group.ranks)) as pool:
        return [each.exception(20) for each in [pool.submit(work, i) for i in range(len(RANKS))]]


@pytest.mark.parametrize("failing", range(len(RANKS)))
def test_every_member_is_told_the_first_failure_now_and_later(failing: int) -> None:
    group = LocalGroup(RANKS, 10.0)

    def work(index: int) -> None:
        if index == failing:
            group.abort(RANKS[index], ValueError("too large\nand a second line"))
        else:
            group.put(index, "all_gather", index)

    raised = all_members(group, work)
    group.abort(RANKS[0], KeyError("a later one"))
    raised += all_members(group, lambda index: group.put(index, "barrier", None))
    told = [str(error) for error in raised if error is not None]
    assert [type(error) for error in raised if error is not None] == [PeerFailure] * 5
    cause = f"rank {RANKS[failing]} failed: ValueError: too large"
    assert all(text.endswith(cause) for text in told)
    others = [rank for rank in RANKS if rank != RANKS[failing]]
    assert [text.partition(":")[0] for text in told] == [
        *(f"rank {rank} stopped in all_gather" for rank in others),
        *(f"rank {rank} stopped in barrier" for rank in RANKS),
    ]


@pytest.mark.parametrize("missing", range(len(RANKS)))
def test_members_that_do_not_come_are_named(missing: int) -> None:
    group = LocalGroup(RANKS, 0.2)

    def work(index: int) -> None:
        if index != missing:
            group.put(index, "all_gather", index)

    raised = all_members(group, work)
    assert raised[missing] is None
    for index, error in enumerate(raised):
        if error is not None:
            assert type(error) is RankFailure
            found = f"rank {RANKS[index]} waited 0.2 s in all_gather for ranks [{RANKS[missing]}] of {RANKS}"
            assert re.match(re.escape(found), str(error))


def test_what_all_put_down_is_seen_by_all_and_gone_after_the_second_meeting() -> None:
    group = LocalGroup(RANKS, 10.0)
    found: dict[int, list[str]] = {}

    def work(index: int) -> None:
        found[index] = group.put(index, "all_gather", f"of {index}")
        group.leave(index, "all_gather")

    assert all_members(group, work) == [None] * 3
    assert found == {member: ["of 0", "of 1", "of 2"] for member in range(3)}
    assert group.places == [None] * 3
