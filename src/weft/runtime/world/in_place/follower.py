"""A rank's side of going on in place: it hears from the launcher that others are lost, and in which world it goes on.

This module needs no torch.
"""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import final

from weft.runtime.world.in_place.line import (
    CANNOT,
    FAILED,
    GO,
    INSIDE,
    LINE,
    OUTSIDE,
    READY,
    RESTART_ALL,
    STOP,
    RankLine,
)

# Seconds in which the launcher says what becomes of ranks that have failed because of others; and of those whose old
# world has ended, for which new processes may have to start.
ANSWER_SECONDS, BEGIN_SECONDS = 20.0, 180.0
# Seconds in which it does of a failure that is this rank's own, as far as can be told: a loss may be behind it.
SOON_SECONDS = 0.3
# The name of the thread that listens.
LISTENS = "weft line"


@final
class Follower:
    """A rank's ear for its launcher: whether ranks are lost, and in which world those that are left go on.

    Args:
        line: to the launcher.
        note: tells of an error whether another rank has caused it, and a text for the launcher.
        renewed: called once the variables of a new world are those of the process.
    """

    def __init__(
        self,
        line: RankLine,
        note: Callable[[BaseException], tuple[bool, str]],
        renewed: Callable[[], None],
    ) -> None:
        self._line, self._note, self._renewed = line, note, renewed
        self._process = os.getpid()
        # The last word of the launcher on the world that there is, "" as long as it stands; set under the event.
        self._word = ""
        self._said = threading.Event()
        self._answers: SimpleQueue[tuple[str, str]] = SimpleQueue()
        self._stop: Callable[[str], object] | None = None

    @property
    def is_here(self) -> bool:
        """False in a process that was forked from the rank."""
        return os.getpid() == self._process

    def enter(self, stop: Callable[[str], object]) -> None:
        """Say that this rank can go on in place from now on.

        Args:
            stop: called, by another thread, with the reason when ranks are lost: every wait for others is to end.
        """
        if self._stop is None:
            threading.Thread(target=self._listen, name=LISTENS, daemon=True).start()
        self._stop = stop
        self._line.say(INSIDE)

    def leave(self) -> None:
        """Say that it cannot any more: its work is done, or has failed for good."""
        self._line.say(OUTSIDE)

    def goes_on(self, error: BaseException) -> bool:
        """True where ranks are lost and those that are left go on in place; `error` has ended the work of this one."""
        by_others, text = self._note(error)
        if by_others and not self._said.is_set():
            self._tell_to_stop(str(error))  # so that nobody waits for this rank
            self._line.say(FAILED, text)
        self._said.wait(ANSWER_SECONDS if by_others else SOON_SECONDS)
        return self._word == STOP

    def renew(self, hindrance: str) -> bool:
        """Say that the old world has ended here, and wait for the new one, whose variables are set then.

        Args:
            hindrance: why it cannot end; "" where it has.

        Returns:
            False where the launcher ends all ranks.
        """
        self._line.say(CANNOT if hindrance else READY, hindrance)
        try:
            word, text = self._answers.get(timeout=BEGIN_SECONDS)
        except Empty:
            return False
        if word != GO:
            return False
        os.environ.update(json.loads(text))
        self._renewed()
        return True

    def _listen(self) -> None:
        for word, text in self._line.heard():
            if word == STOP:
                # Before the rank hears of it: what it begins afterwards is of the new world, and is not to stop.
                self._tell_to_stop(text)
                self._word = STOP
                self._said.set()
            elif word == RESTART_ALL:
                self._word = RESTART_ALL
                self._said.set()
                self._answers.put((word, text))
            elif word == GO:
                # Before the rank hears of it: the next loss may be told at once.
                self._word = ""
                self._said.clear()
                self._answers.put((word, text))
        self._line.close()

    def _tell_to_stop(self, why: str) -> None:
        # What waits for ever then is seen by the launcher: this rank stays silent.
        with suppress(Exception):
            if self._stop is not None:
                self._stop(why)


# Of this process; None where no launcher has given it a line.
_follower: list[Follower] = []


def open_line(
    note: Callable[[BaseException], tuple[bool, str]], renewed: Callable[[], None]
) -> None:
    """Take the line that the launcher gave this process, if it did; processes that it starts do not get it.

    Args:
        note, renewed: as `Follower` takes them.
    """
    number = os.environ.pop(LINE, "")
    if number:
        os.set_inheritable(int(number), False)
        end = socket.socket(fileno=int(number))
        _follower[:] = [Follower(RankLine(end), note, renewed)]


def follower() -> Follower | None:
    """The follower of this process; None where no launcher has given it a line."""
    return next((each for each in _follower if each.is_here), None)
