"""While a step is compiled: progress on the terminal or in the log "weft", and Python's garbage collector held back."""

from __future__ import annotations

import gc
import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from typing import TYPE_CHECKING, Any, final

from weft.units import Seconds

if TYPE_CHECKING:
    from rich.live import Live
    from rich.spinner import Spinner

_log = logging.getLogger("weft")
# For so long nothing is shown: most programs are compiled by then.
DELAY = Seconds(2.0)
# After which a line is drawn again.
_REDRAWN = Seconds(0.25)


@contextmanager
def progress(first: bool, delay: Seconds = DELAY) -> Iterator[Callable[[str], None]]:
    """Gives what says that a phase begins.

    A terminal shows the phase and for how long it has run, unless something else is drawn there; the line is gone at
    the end. The log "weft" is told each phase when it has ended.

    Args:
        first: true if this process has the first rank, so that its terminal shows the line.
        delay: after which the line is shown.
    """
    shown = first and is_terminal()
    begun: list[tuple[str, float]] = []

    def ended() -> None:
        if begun:
            name, start = begun.pop()
            _log.info("%s took %.1f s", name, time.perf_counter() - start)

    def begin(name: str) -> None:
        ended()
        begun.append((name, time.perf_counter()))
        if line is not None:
            line.begin(name)

    with _line(delay) if shown else nullcontext() as line:
        yield begin
        ended()


@contextmanager
def _line(delay: Seconds) -> Iterator[_PhaseLine]:
    """A line that is shown after a while, and gone at the end with its thread."""
    line = _PhaseLine(delay)
    line.start()
    try:
        yield line
    finally:
        line.end()


@final
class _PhaseLine:
    """A line on the terminal that says what is going on, and for how long.

    A thread draws it, so that it moves while Python computes.

    Args:
        delay: before which nothing is shown.
    """

    def __init__(self, delay: Seconds) -> None:
        self._delay = delay
        self._started = time.perf_counter()
        # The current phase, and its start.
        self._phase = "compiling", self._started
        # rich takes long to import, and most have no use for it.
        self._spinner: Spinner = import_module("rich.spinner").Spinner("dots")
        make = import_module("rich.live").Live
        self._live: Live = make(
            get_renderable=self._drawn, auto_refresh=False, transient=True, **display_options()
        )
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._draw, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def begin(self, name: str) -> None:
        """Say that a phase begins."""
        self._phase = name, time.perf_counter()

    def end(self) -> None:
        self._over.set()
        self._thread.join()

    def _draw(self) -> None:
        if self._over.wait(self._delay):
            return
        with alone() as own:
            if own:
                with self._live:
                    self._live.refresh()
                    while not self._over.wait(_REDRAWN):
                        self._live.refresh()

    def _drawn(self) -> Spinner:
        """The line as it is to be drawn now."""
        (name, since), now = self._phase, time.perf_counter()
        text = f"weft: {name} … {now - since:.0f} s"
        if since > self._started + 1:
            text += f", {now - self._started:.0f} s in all"
        self._spinner.update(text=text)
        return self._spinner


@contextmanager
def uncollected() -> Iterator[None]:
    """Hold Python's garbage collector back.

    Nearly all that capturing and planning make stays, so looking through it again and again would
    make the time grow faster than the model.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@contextmanager
def passed_over() -> Iterator[None]:
    """Have Python's garbage collector pass over all that is there by now, such as modules and a captured step.

    A look through these takes some tenths of a second, and comes at any time.
    """
    own = not gc.get_freeze_count()
    if own:
        gc.freeze()
    try:
        yield
    finally:
        if own:
            gc.unfreeze()


# Two displays of one process would draw over one another.
_FREE = threading.Lock()


def is_terminal() -> bool:
    """True if stderr is a terminal. Nothing is drawn into a file, also where FORCE_COLOR asks for colors there."""
    return _is_terminal(sys.stderr)


def display_options() -> dict[str, Any]:
    """The options of rich's displays: they draw on stderr, and what is printed meanwhile stays on stdout.

    Where stdout is a terminal, too, it is taken for the same one: lines are printed above the display then.
    """
    # rich takes long to import, and most have no use for it.
    console = import_module("rich.console").Console(stderr=True)
    return {"console": console, "redirect_stdout": _is_terminal(sys.stdout)}


@contextmanager
def alone() -> Iterator[bool]:
    """Gives true if this process draws nothing else; until the end nothing else gets true then."""
    own = _FREE.acquire(blocking=False)
    try:
        yield own
    finally:
        if own:
            _FREE.release()


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()
