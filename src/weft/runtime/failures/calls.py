"""The calls that all ranks must make alike (`compile`, `step`, …), and how ranks that made others find out.

Every process keeps the sequence of its calls as a chain of checksums. A rank that waits long posts the
end of its chain, and compares it with what others posted: where the chains part, two ranks make
different calls, and neither will come to the other.
"""

from __future__ import annotations

import json
import sys
import sysconfig
import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from typing import final

from weft.errors import RankFailure
from weft.files import in_library
from weft.runtime.failures.board import FailureBoard

# So many calls back a divergence is found.
_KEPT = 32
_PYTHON = sysconfig.get_path("stdlib")
# The kind of what is posted.
CALLS = "calls"


@final
@dataclass(frozen=True)
class PostedCall:
    """A call: how many were made by then, the checksum of all of them, which it is, and the user's line."""

    count: int
    chain: int
    text: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.text} ({self.file}:{self.line})" if self.file else self.text


@final
class Calls:
    """The calls of this process so far."""

    def __init__(self) -> None:
        self._recent = deque([PostedCall(0, 0, "the beginning", "", 0)], maxlen=_KEPT)
        self._programs = 0

    def enter(self, text: str) -> int:
        """A call begins; gives the checksum of all calls so far."""
        last = self._recent[-1]
        chain = zlib.crc32(text.encode(), last.chain)
        self._recent.append(PostedCall(last.count + 1, chain, text, *user_line()))
        return chain

    def new_program(self) -> int:
        """The number of one more program, from 1."""
        self._programs += 1
        return self._programs

    @property
    def last(self) -> PostedCall:
        """The call that runs, or was the last one."""
        return self._recent[-1]

    def posted(self) -> str:
        """The last calls as text."""
        return json.dumps([astuple(call) for call in self._recent])

    def parted(self, text: str) -> tuple[PostedCall, PostedCall] | None:
        """The first call that differs from those that another rank posted: this rank's call, and the other's."""
        theirs = {call.count: call for call in _read(text)}
        for own in self._recent:
            other = theirs.get(own.count)
            if other is not None and other.chain != own.chain:
                return own, other
        return None


def _read(text: str) -> list[PostedCall]:
    return [PostedCall(*each) for each in json.loads(text)]


def user_line() -> tuple[str, int]:
    """File and line of the innermost frame that is neither weft's nor torch's nor Python's own."""
    frame = sys._getframe(2)
    while frame.f_back is not None and _is_library(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename, frame.f_lineno


@cache
def _is_library(file: str) -> bool:
    return in_library(file) or file.startswith(_PYTHON)


def accounts(
    calls: Calls, board: FailureBoard, rank: int, ranks: tuple[int, ...]
) -> Callable[[], str]:
    """The function that tells, after a failure, in which call this rank is, and which were the last of others known."""

    def tell() -> str:
        last = {peer: board.posted(peer, CALLS) for peer in ranks if peer != rank}
        texts = [
            f"rank {peer} was last in {_read(text)[-1]}" for peer, text in last.items() if text
        ]
        return "; ".join(["", f"rank {rank} is in {calls.last}", *texts])

    return tell


def looking(
    calls: Calls, board: FailureBoard, rank: int, ranks: tuple[int, ...]
) -> Callable[[], None]:
    """The function that a rank calls each second while it waits for others: say in which call it is, look at theirs.

    Args:
        calls: of this rank.
        board: where ranks post.
        rank: this one.
        ranks: that are waited for, among others.
    """

    def look() -> None:
        board.post(calls.posted(), CALLS)
        for peer in ranks:
            text = board.posted(peer, CALLS) if peer != rank else ""
            found = calls.parted(text) if text else None
            if found is not None:
                error = RankFailure(
                    "the ranks make different calls, and wait for one another; every rank must make the same calls in "
                    f"the same order: rank {rank} is in {found[0]}, rank {peer} in {found[1]}"
                )
                board.announce(error)
                raise error

    return look
