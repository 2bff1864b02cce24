"""Python's state that a step changes and the next could read: iterators, random number generators, and errors.

Other values are compared before and after a trace by the recorder.
"""

from __future__ import annotations

import queue
import random
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, final

import numpy as np

from weft.capture.watch import Content, Entry
from weft.errors import CaptureError

# Of how many iterators inside of each other (`map`, `zip`) it is seen where they are.
_DEPTH = 4


@final
class Moving:
    """Objects which a step that only reads them advances, with where they were before it."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Any, str, Any]] = {}

    def see(self, value: Any, text: str) -> bool:
        """Look after a value, which the user calls `text`, from now on; False where it is no such object."""
        if not _moves(value):
            return False
        self._seen.setdefault(id(value), (value, text, _at(value)))
        return True

    def check(self) -> None:
        """Check that all are where they were.

        Raises:
            CaptureError: naming one that is not.
        """
        for value, text, before in self._seen.values():
            now = _at(value)
            # Other threads put into a queue, and so may the step.
            if before is not None and (
                now < before if isinstance(value, queue.Queue) else now != before
            ):
                raise CaptureError(
                    f"the step takes what it reads from {text}, a {type(value).__name__}, which gives something else "
                    "each time: captured once, it would read the same for ever. Take it outside of the step, and pass "
                    "it in the batch; draw random numbers by torch.rand and the like"
                )

    def unknown(self) -> Iterator[Entry]:
        """Those of which it cannot be seen where they are."""
        for value, text, before in self._seen.values():
            if before is None:
                yield Entry({}, None, value, text)


def depends_on(changes: Sequence[Entry]) -> CaptureError:
    """The error for a step that is another one after it has changed some values."""
    shown = "; ".join(map(_words, changes[:3]))
    more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
    return CaptureError(
        f"the step changes {shown}{more}, and reads it: captured once, it would read the same value for ever. Keep it "
        "in a tensor (register_buffer, and write it in place), or outside of the step and pass it in the batch"
    )


def keeps(place: str) -> CaptureError:
    """The error for a step that is another one after it has kept a tensor in `place`."""
    return CaptureError(
        f"the step keeps a tensor in {place}, and run again from there it is another step, as one that does something "
        "the first time only: captured once, it would do so every time. Do that before, outside of the step"
    )


def _words(entry: Entry) -> str:
    if isinstance(entry.space, Content):
        return entry.text
    if hasattr(type(entry.value), "__next__"):
        return f"{entry.text}, a {type(entry.value).__name__}, by taking from it"
    return f"{entry.text} from {entry.then} to {entry.now}"


def _moves(value: Any) -> bool:
    if isinstance(value, random.Random | np.random.Generator | np.random.RandomState | queue.Queue):
        return True
    # A class of Python that is an iterator has attributes, which are watched.
    return hasattr(type(value), "__next__") and not hasattr(value, "__dict__")


def _at(value: Any, depth: int = _DEPTH) -> Any:
    """The position of an object, to be compared; None when that cannot be seen."""
    if isinstance(value, random.Random):
        return repr(value.getstate())
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, np.random.RandomState):
        return repr(value.get_state(legacy=False))
    if isinstance(value, queue.Queue):
        return value.qsize()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return _reduced(value, depth)
    except Exception:  # it cannot be pickled, as a generator or a file
        return None


def _reduced(value: Any, depth: int) -> str:
    """An iterator as it would be pickled, with the iterators that it takes from."""
    parts = value.__reduce__()
    flat = [part for each in parts for part in (each if isinstance(each, tuple) else (each,))]
    words = []
    for part in flat:
        if not hasattr(type(part), "__next__"):
            words.append(str(part) if isinstance(part, int | float) else str(id(part)))
        elif depth == 0:
            raise TypeError
        else:
            inner = _at(part, depth - 1)
            if inner is None:
                raise TypeError
            words.append(inner)
    return " ".join(words)
