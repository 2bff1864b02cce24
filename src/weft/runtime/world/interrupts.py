"""The signals by which a launcher is told to end: heard where it waits, kept where nothing may disturb it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, final

# By which schedulers tell jobs to end that ask for it, as by Slurm's --signal.
_OF_SCHEDULERS = ("SIGUSR1", "SIGUSR2")
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", *_OF_SCHEDULERS)


def ending_signals() -> list[signal.Signals]:
    """SIGINT and SIGTERM, and of SIGUSR1 and SIGUSR2 those that this process has no handler for and would die of."""
    others = [getattr(signal, name) for name in _OF_SCHEDULERS if hasattr(signal, name)]
    default = (n for n in others if signal.getsignal(n) is signal.SIG_DFL)
    # faulthandler.register tells Python's own table nothing.
    return [signal.SIGINT, signal.SIGTERM, *(n for n in default if not catches(os.getpid(), n))]


def catches(pid: int, number: int) -> bool:
    """True where a process has a handler for a signal; False where the system does not tell."""
    if sys.platform != "linux":
        return False
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _nothing() -> None: ...


@final
class Interrupts:
    """Takes the signals that tell this process to end, as long as it is entered.

    The first one counts, and those behind it disturb nothing, but for Ctrl-C where someone wants to hear of it. Signals
    that were ignored, as SIGHUP is under nohup, stay so. Outside the main thread none is heard.
    """

    def __init__(self) -> None:
        self.heard = False
        self._tell: Callable[[], object] = _nothing
        self._hurry: Callable[[], object] = _nothing
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
            found = {number: signal.getsignal(number) for number in numbers}
            # None: of no handler of Python's.
            self._before = {n: by for n, by in found.items() if by not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def told_to(
        self, tell: Callable[[], object], hurry: Callable[[], object] = _nothing
    ) -> Iterator[None]:
        """Call `tell` as soon as one comes while the body runs, and at its beginning where one has come before."""
        before = self._tell, self._hurry
        self._tell, self._hurry = tell, hurry
        try:
            if self.heard:
                tell()
            yield
        finally:
            self._tell, self._hurry = before

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in the body."""
        with self.told_to(_interrupt):
            yield

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if not self.heard:
            self.heard = True
            self._tell()
        elif number == signal.SIGINT:
            self._hurry()


def _interrupt() -> None:
    raise KeyboardInterrupt
