"""The line between a launcher and a rank: a pair of sockets without a name, each end of which one process holds.

What is said is a word and a text. Nobody else can reach it, and it goes with the processes. This module needs no torch.
"""

from __future__ import annotations

import json
import select
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Final, final

# Holds the number of the descriptor of a rank's end.
LINE: Final = "WEFT_LINE"

# A rank says that it can go on in place from now on, and not any more.
INSIDE, OUTSIDE = "inside", "outside"
# That its work failed because of another one; that its old world has ended; that this cannot be.
FAILED, READY, CANNOT = "failed", "ready", "cannot"
# The launcher says that ranks are lost; that they go on, with the variables of the new world; that all start again.
STOP, GO, RESTART_ALL = "stop", "go", "restart"

# Bytes of a message at most; longer texts are cut.
_MOST = 2**15
_READ = 2**12


@final
class RankLine:
    """One end of a line.

    Args:
        end: a connected stream socket; it belongs to the line.
    """

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._lock = threading.Lock()
        # Of a message, what has come; under its lock.
        self._rest, self._taking = b"", threading.Lock()

    def say(self, word: str, text: str = "") -> None:
        """Say something; where the other end has gone, nobody hears it. Any thread may call it."""
        message = json.dumps([word, text[:_MOST]]).encode() + b"\n"
        with self._lock, suppress(OSError):
            self._end.sendall(message)

    def heard(self) -> Iterator[tuple[str, str]]:
        """Words and texts of the other end, as they come, until it or this one closes, without what is no message."""
        found: list[tuple[str, str]] = []
        is_open = True
        while is_open:
            is_open = self._wait() and self.take(lambda *message: found.append(message))
            yield from found
            found.clear()

    def hear(self, tell: Callable[[str, str], object]) -> None:
        """Tell words and texts of the other end, as they come, until it or this one closes."""
        while self._wait() and self.take(tell):
            pass

    def take(self, tell: Callable[[str, str], object]) -> bool:
        """Tell the words and texts that have come by now; False where an end has closed.

        When it returns, those that another thread was taking are told, too.
        """
        with self._taking:
            while True:
                try:
                    came = self._end.recv(_READ, socket.MSG_DONTWAIT)
                except BlockingIOError:
                    return True
                except OSError:
                    return False
                if not came:
                    return False
                *messages, self._rest = (self._rest + came).split(b"\n")
                for message in messages:
                    with suppress(ValueError, TypeError):
                        word, text = json.loads(message)
                        tell(str(word), str(text))

    def _wait(self) -> bool:
        """Wait until there is something to take; False where this end is closed."""
        poll = select.poll()
        try:
            poll.register(self._end, select.POLLIN)
        except ValueError:
            return False
        poll.poll()
        return True

    def close(self) -> None:
        """Close it; who listens at either end hears no more."""
        with suppress(OSError):
            self._end.shutdown(socket.SHUT_RDWR)
        self._end.close()
