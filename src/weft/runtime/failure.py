"""How a failure travels between ranks: the first error is kept, the ranks that it wakes name it."""

from __future__ import annotations

from weft.errors import RankFailure


class PeerFailure(RankFailure):
    """This rank stopped only because another one failed; that one's error is the cause."""


def first_line(error: BaseException) -> str:
    """The error's type and the first line of its message."""
    text = str(error).strip()
    return f"{type(error).__name__}: {text.splitlines()[0]}" if text else type(error).__name__


def root_failure(errors: list[BaseException]) -> BaseException:
    """The error to show of those that the ranks raised, given in the order of time: the first that no peer caused."""
    own = [error for error in errors if not isinstance(error, PeerFailure)]
    return (own or errors)[0]
