"""The terminal on which progress is drawn: that of stderr, by one display at a time."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

# Two displays of one process would draw over one another.
_FREE = threading.Lock()


def is_terminal() -> bool:
    """True where stderr is a terminal. Nothing is drawn into a file, also where FORCE_COLOR asks for colors there."""
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
    """Gives true where this process draws nothing else; until the end nothing else gets true then."""
    own = _FREE.acquire(blocking=False)
    try:
        yield own
    finally:
        if own:
            _FREE.release()


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()
