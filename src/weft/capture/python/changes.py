"""Python's state that a step changes and the next could read: iterators, random number generators, and errors.

Other values are compared before and after a trace by the recorder.
"""

from __future__ import annotations

import os
import queue
import random
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from threading import get_ident
from typing import Any, TypeAlias, final
from unittest.mock import patch

import numpy as np
import torch

from weft.capture.fx.generators import state_of
from weft.capture.fx.private import Refusal
from weft.capture.watch import Content, Entry
from weft.errors import CaptureError
from weft.files import in_library, standard, users_file

Places: TypeAlias = "tuple[tuple[Any, str], ...]"
# What sets the generators that all share, and what draws by chance where no seed is given.
_SEEDS: Places = (
    (random, "seed"),
    (random, "setstate"),
    (np.random, "seed"),
    (np.random, "set_state"),
)
_CHANCE: Places = ((os, "urandom"), (random, "_urandom"), (random.Random, "seed"))
_DRAWN = (
    "draws random numbers of Python, numpy or the system, or sets their seed or state: captured once, it would do so "
    "no more. Draw by torch.rand and the like, by random.Random(seed), or outside, and pass what was drawn in the batch"
)
_MOVING = (random.Random, np.random.Generator, np.random.RandomState, torch.Generator, queue.Queue)
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


@contextmanager
def randomness_refused() -> Iterator[None]:
    """While this lasts, this thread may draw in Python by a seed of its own only.

    Raises:
        Refusal: where it sets the generators of `random` or `numpy.random`, or its code has none.
        CaptureError: when these generators have been drawn from.
    """
    own, states = get_ident(), _random_states()
    others = []  # threads, as those that load batches, which have the same generators

    def watched(space: Any, name: str, refused: Callable[[str, tuple[Any, ...]], bool]) -> Any:
        plain = getattr(space, name)

        def call(*args: Any, **named: Any) -> Any:
            if get_ident() != own:
                others.append(get_ident())
            elif refused(_caller(), args):
                raise Refusal(_DRAWN)
            return plain(*args, **named)

        return patch.object(space, name, call)

    with ExitStack() as stack:
        for space, name in _SEEDS:
            stack.enter_context(watched(space, name, lambda file, _: not in_library(file)))
        for space, name in _CHANCE:
            stack.enter_context(watched(space, name, _by_chance))
        yield
    if _random_states() != states and not others:
        raise CaptureError(f"the step {_DRAWN}")


def _by_chance(file: str, args: tuple[Any, ...]) -> bool:
    """True for a call in the user's own code that gives no seed, which is the second argument."""
    return users_file(file) and args[1:2] in ((), (None,))


def _caller() -> str:
    """The file of the code, other than Python's library, that has led to the running call."""
    frame = sys._getframe(2)
    while frame.f_back is not None and standard(frame.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code.co_filename


def _random_states() -> tuple[str, ...]:
    return repr(random.getstate()), repr(np.random.get_state())


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
    if isinstance(value, _MOVING):
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
    if isinstance(value, torch.Generator):
        return state_of(value)
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
