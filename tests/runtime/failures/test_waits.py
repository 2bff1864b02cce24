"""Circles among ranks that wait in different groups; nobody is accused who may still come."""

from __future__ import annotations

import pytest

from weft.runtime.failures.call_log import EagerWait, PostedCall, PostedCalls, wait_cycle


def wait(*ranks: int, count: int = 1, **begun: int) -> PostedCalls:
    """In a group of ranks; `begun` names groups by their digits, such as g12=1."""
    every = {tuple(map(int, name[1:])): number for name, number in begun.items()} | {ranks: count}
    call = PostedCall(1, 7, f"op of {ranks}", "file.py", 3)
    return PostedCalls((call,), tuple(every.items()), EagerWait(ranks, count, call))


@pytest.mark.parametrize(
    ("posted", "found"),
    [
        ({0: wait(0, 1), 1: wait(1, 0)}, [0, 1]),
        ({0: wait(0, 1), 1: wait(1, 2), 2: wait(0, 2)}, [0, 1, 2]),
        ({0: wait(0, 3, 1), 1: wait(1, 2), 2: wait(0, 2)}, [0, 1, 2]),  # 3 is only slow
        ({0: wait(0, 1), 1: wait(1, 2)}, []),  # 2 is slow
        ({0: wait(0, 1)}, []),
        ({0: wait(0, 1), 1: wait(0, 1)}, []),  # both have come: they are about to go on
        ({0: wait(0, 1, 2), 1: wait(1, 0, g012=1), 2: wait(0, 1, 2)}, []),  # 0 will see it soon
        ({0: wait(0, 1), 1: wait(1, 2), 2: wait(2, 1)}, []),  # theirs to tell
        ({0: wait(0, 1, count=3), 1: wait(1, 0, g01=2)}, [0, 1]),
    ],
)
def test_circles(posted: dict[int, PostedCalls], found: list[int]) -> None:
    assert list(wait_cycle(0, posted[0], posted.get)) == found


def test_text_of_a_wait_can_be_read() -> None:
    one = wait(0, 2, count=5, g12=3)
    assert PostedCalls.parse(str(one)) == one
