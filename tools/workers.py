"""A process that answers one question at a time: a question that crashes or hangs ends its process, not the run."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Generic, TypeVar

Asked = TypeVar("Asked")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class Lost:
    """A question without an answer: its process hung, or ended; `why` says it in words."""

    why: str
    hung: bool


class Worker(Generic[Asked, Answer]):
    """A forked process; started anew when it died or hung.

    Args:
        answer: called there, with what is asked; both travel through a pipe.
        limit: seconds that an answer may take.
        most: answers after which the process is started anew, so that nothing piles up.
    """

    def __init__(
        self, answer: Callable[[Asked], Answer], limit: float, most: int | None = None
    ) -> None:
        self._function, self._limit, self._most = answer, limit, most
        self.asked: Asked | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._function), daemon=True)
        self._process.start()
        self._done = 0
        other.close()

    def ask(self, asked: Asked) -> None:
        """Begin with a question; `answer` waits for what comes."""
        if self._most is not None and self._done >= self._most:
            self._restart()
        self.asked, self._since = asked, time.monotonic()
        self.connection.send(asked)

    @property
    def late(self) -> bool:
        """True where the answer takes longer than it may."""
        return time.monotonic() - self._since > self._limit

    def answer(self) -> Answer | Lost:
        """The answer to what was asked, within the limit."""
        self.asked = None
        if not self.connection.poll(max(0.0, self._limit - (time.monotonic() - self._since))):
            self._restart()
            return Lost(f"took more than {self._limit:g} s", hung=True)
        try:
            found: Answer = self.connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self._restart()
            return Lost(f"ended the process with exit code {code}", hung=False)
        self._done += 1
        return found

    def _restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, answer: Callable[[Asked], Answer]) -> None:
    warnings.simplefilter("ignore")
    while True:
        try:
            asked = connection.recv()
        except EOFError:
            return  # nobody asks any longer
        connection.send(answer(asked))
