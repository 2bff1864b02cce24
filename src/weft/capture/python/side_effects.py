"""Python's state that a step changes and the next could read: iterators, random number generators, and errors.

Other values are compared before and after a trace by the recorder.
"""

from __future__ import annotations

import os
import queue
import random
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import numpy as np
import torch

from weft.capture.fx.generators import redirect_calls, state_of
from weft.capture.fx.private import Refusal
from weft.capture.python_guards import Guard, QueriedValue, question_guard
from weft.errors import CaptureError
from weft.files import in_library, standard, users_file

Places: TypeAlias = "tuple[tuple[Any, str], ...]"
# Functions that seed the shared generators, and functions that draw at random without a seed.
_SEEDS: Places = (
    (random, "seed"),
    (random, "setstate"),
    (np.random, "seed"),
    (np.random, "set_state"),
)
_CHANCE: Places = ((os, "urandom"), (random, "_urandom"), (random.Random, "seed"))
_DRAWN = (
    "draws random numbers of Python, numpy or the system, or sets their seed or state: captured once, the step would "
    "no longer do so. Draw by torch.rand and the like, by random.Random(seed), or outside, and pass what was drawn "
    "in the batch"
)
_SET = (
    "Set it before weft.compile, as in the model's config, or call the model once before, where it stays from then on; "
    "or pass it in the batch"
)
_KEEP = "Keep it in a tensor (register_buffer, and write it in place), or outside of the step and pass it in the batch"
# For objects that give something else each time, where they are.
_POSITIONS: Mapping[type, Callable[[Any], Any]] = {
    random.Random: lambda value: repr(value.getstate()),
    np.random.Generator: lambda value: repr(value.bit_generator.state),
    np.random.RandomState: lambda value: repr(value.get_state(legacy=False)),
    torch.Generator: state_of,
    queue.Queue: queue.Queue.qsize,
}
# Of how many iterators inside of each other (`map`, `zip`) it is seen where they are.
_DEPTH = 4


def position_of(value: Any, text: str) -> Guard | None:
    """The position of an iterator or generator that a step advances by reading it; None for any other value.

    Its value is None if the position cannot be seen, as that of a generator or file.
    """
    return question_guard(value, partial(_at, value), text) if _moves(value) else None


def check_unmoved(positions: Iterable[Guard]) -> Iterator[Guard]:
    """Check that iterators, queues and generators are where they were.

    Yields:
        The objects whose position cannot be read.

    Raises:
        CaptureError: naming one that is not.
    """
    for entry in positions:
        value, now = entry.space.owner, entry.value_now
        if entry.value is None:
            yield Guard({}, None, value, entry.text)
        # Other threads put into a queue, and so may the step.
        elif now < entry.value if isinstance(value, queue.Queue) else now != entry.value:
            raise CaptureError(
                f"the step takes what it reads from {entry.text}, a {type(value).__name__}, which returns something "
                "else each time: captured once, the step would always read the same. Take it outside of the step, "
                "and pass it in the batch; draw random numbers by torch.rand and the like"
            )


@contextmanager
def randomness_refused() -> Iterator[None]:
    """Within the context, this thread may draw in Python by a seed of its own only.

    Raises:
        Refusal: where it sets the generators of `random` or `numpy.random`, or its code has none.
        CaptureError: when these generators have been drawn from.
    """
    states = _random_states()

    def refused(by: Callable[[str, tuple[Any, ...]], bool]) -> Callable[..., Any]:
        def made(plain: Callable[..., Any]) -> Any:
            def call(*args: Any, **named: Any) -> Any:
                # The code, other than Python's library, that has led to the call.
                frame = sys._getframe(2)
                while frame.f_back is not None and standard(frame.f_code.co_filename):
                    frame = frame.f_back
                if by(frame.f_code.co_filename, args):
                    raise Refusal(_DRAWN)
                return plain(*args, **named)

            return call

        return made

    seeding = refused(lambda file, _: not in_library(file))
    # The user's own code that gives no seed, which is the second argument.
    by_chance = refused(lambda file, args: users_file(file) and args[1:2] in ((), (None,)))
    places = [(*x, seeding) for x in _SEEDS], [(*x, by_chance) for x in _CHANCE]
    with redirect_calls(
        *places[0], *places[1]
    ) as others:  # which load batches, by the same generators
        yield
    if _random_states() != states and not others:
        raise CaptureError(f"the step {_DRAWN}")


def _random_states() -> tuple[str, ...]:
    return repr(random.getstate()), repr(np.random.get_state())


def depends_on(changes: Sequence[Guard]) -> CaptureError:
    """The error for a step that is another one after it has changed some values."""
    shown = "; ".join(map(_words, changes[:3]))
    more = f"; and {len(changes) - 3} more" if len(changes) > 3 else ""
    remedy = _SET if all(isinstance(each.value_now, str) for each in changes) else _KEEP
    return CaptureError(
        f"the step changes {shown}{more}, and reads it: captured once, the step would always read the same value. "
        f"{remedy}"
    )


def may_hold_state(place: str) -> CaptureError:
    """The error for a step that is another one after it has kept a tensor in `place`."""
    return CaptureError(
        f"the step keeps a tensor in {place}, and a second run does something else, such as a step that acts only the "
        "first time: captured once, the step would act every time. Do that before, outside of the step"
    )


def _words(entry: Guard) -> str:
    if isinstance(entry.space, QueriedValue) and isinstance(entry.value, bytes):
        return entry.text
    if hasattr(type(entry.value), "__next__"):
        return f"{entry.text}, a {type(entry.value).__name__}, by taking from it"
    return f"{entry.text} from {entry.then} to {entry.now}"


def _moves(value: Any) -> bool:
    # A class of Python that is an iterator has attributes, which are watched.
    iterates = hasattr(type(value), "__next__") and not hasattr(value, "__dict__")
    return iterates or isinstance(value, tuple(_POSITIONS))


def _at(value: Any, depth: int = _DEPTH) -> Any:
    """The position of an object, to be compared; None when that cannot be seen."""
    position = next((at for kind, at in _POSITIONS.items() if isinstance(value, kind)), None)
    if position is not None:
        return position(value)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parts = value.__reduce__()
        flat = [part for each in parts for part in (each if isinstance(each, tuple) else (each,))]
        words = [
            (_at(x, depth - 1) if depth else None)  # of an iterator that it takes from
            if hasattr(type(x), "__next__")
            else str(x if isinstance(x, int | float) else id(x))
            for x in flat
        ]
    except Exception:  # it cannot be pickled, as a generator or a file
        return None
    return None if None in words else " ".join(map(str, words))
