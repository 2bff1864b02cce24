"""Python's garbage collector, held back while a step is captured and planned."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
