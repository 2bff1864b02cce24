"""Modules that torch imports while it traces, imported before: an interrupt in the middle would leave halves of them."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from types import FrameType

# Sympy takes longest, and what of it is half imported raises in every later capture of the process.
MODULES = ("sympy", "torch.fx.experimental.symbolic_shapes")


@cache
def import_whole() -> None:
    """Import them, once; an interrupt of this process is raised afterwards."""
    with _interrupts_later():
        for name in MODULES:
            import_module(name)


@contextmanager
def _interrupts_later() -> Iterator[None]:
    """Hold SIGINT back where its handler is Python's own; other threads than the main one cannot, and need not."""
    here = threading.current_thread() is threading.main_thread()
    if not here or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        came.append(number)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if came:
        raise KeyboardInterrupt
