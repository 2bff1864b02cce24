"""Signals that end a loop, agreed between processes: all stop after the same step."""

from __future__ import annotations

import json
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

from weft.runtime.world.interrupts import ending_signals
from weft.units import Seconds

# Processes compare notes about so often.
_EVERY = Seconds(0.5)
# Steps between two comparisons at most: steps may become slower.
_MOST = 1000


@final
class Stopping:
    """The decision that a loop is to end, the same on all processes.

    Args:
        tell: gives the texts of all processes, given this one's; None where this is the only one.
    """

    def __init__(self, tell: Callable[[str], list[str]] | None) -> None:
        self._tell = tell
        self._signal = 0
        self._left = 0
        self._since = time.monotonic()
        self._steps = 0

    def after_step(self) -> int:
        """The number of the signal that ends the loop now; 0 to go on. All processes call it after each step."""
        if self._tell is None:
            return self._signal
        self._steps += 1
        if self._left > 0:
            self._left -= 1
            return 0
        now = time.monotonic()
        took = max((now - self._since) / self._steps, 1e-6)
        own = [self._signal, max(0, min(int(_EVERY / took), _MOST) - 1)]
        every = [json.loads(text) for text in self._tell(json.dumps(own))]
        self._left = every[0][1]
        self._since, self._steps = time.monotonic(), 0
        return int(max(number for number, _ in every))

    def note(self, number: int, _: FrameType | None = None) -> None:
        """A signal has come; Ctrl-C after another one ends the process as usual.

        SIGTERM may come twice, as where a scheduler sends it to ranks and launcher, and this one to its ranks.
        """
        if self._signal and number == signal.SIGINT:
            raise KeyboardInterrupt
        self._signal = self._signal or number

    @contextmanager
    def listening(self) -> Iterator[None]:
        """The signals that tell a job to end are noted meanwhile, where this is the main thread."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before: dict[int, Any] = {each: signal.signal(each, self.note) for each in ending_signals()}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
