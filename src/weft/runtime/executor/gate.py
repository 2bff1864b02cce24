"""Acts that wait until others have ended, so that no run takes more memory than the plan says."""

from __future__ import annotations

from collections.abc import Iterable
from threading import Lock
from typing import final

from weft.actors.messages import Turn


@final
class Gate:
    """The acts of a rank's step that have ended, and the queues whose next act waits for more of them.

    Args:
        turns: all acts that take memory; the others wait for nothing.
    """

    def __init__(self, turns: Iterable[Turn]) -> None:
        self._turns = {(turn.actor, turn.micro): turn for turn in turns}
        self._lock = Lock()
        # By place among the ends of a step; the first `_count` have all been.
        self._ended = [False] * (len(self._turns) + 1)
        self._count = 0
        # The queues that wait, and for how many ends.
        self._waiting: dict[str, int] = {}

    @property
    def needed(self) -> bool:
        """True where some act waits."""
        return any(turn.waits for turn in self._turns.values())

    def begin(self) -> None:
        """A step begins; the last one has ended."""
        self._ended = [False] * len(self._ended)
        self._count = 0

    def opens(self, queue: str, actor: int, micro: int) -> bool:
        """True where an act may begin now; else its queue is among those that `end` returns one day."""
        turn = self._turns.get((actor, micro))
        if turn is None or not turn.waits:
            return True
        with self._lock:
            if turn.waits <= self._count:
                return True
            self._waiting[queue] = turn.waits
            return False

    def end(self, actor: int, micro: int) -> tuple[str, ...]:
        """An act has ended, and given back what it read; returns the queues that need not wait any more."""
        turn = self._turns.get((actor, micro))
        if turn is None:
            return ()
        with self._lock:
            self._ended[turn.place] = True
            while self._ended[self._count]:
                self._count += 1
            if not self._waiting:
                return ()
            free = tuple(queue for queue, count in self._waiting.items() if count <= self._count)
            for queue in free:
                del self._waiting[queue]
            return free
