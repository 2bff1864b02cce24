"""`torch.utils.checkpoint` in a step: what it wraps runs once, and is marked for the backward to make again.

The plan makes it again as `Strategy(recompute=)` does, with the same random numbers; so both forms of
checkpoints may hold dropout. Policies of selective checkpoints decide nothing: all is made again.

Private API: `CheckpointFunction` and `_checkpoint_without_reentrant_generator` of
`torch.utils.checkpoint`, which its `checkpoint` looks up by name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import count
from typing import Any, final
from unittest.mock import patch

import torch
import torch.utils.checkpoint as checkpoints
from torch.utils._python_dispatch import TorchDispatchMode

from weft.capture.fx.private import note, notes_now, running_sequence

_CHECKPOINT = "weft.checkpoint"


@contextmanager
def checkpoints_noted() -> Iterator[None]:
    """While this lasts, nodes are recorded with the number of the outermost checkpoint around them."""
    numbers = count()

    @contextmanager
    def region() -> Iterator[None]:
        # In a backward, as of a checkpoint written by hand, everything is made again already.
        inside = _CHECKPOINT in notes_now() or running_sequence() is not None
        with note(**({} if inside else {_CHECKPOINT: next(numbers)})):
            yield

    @final
    class Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], _preserve: bool, *args: Any) -> Any:
            # Like torch does: nothing inside is trained when no argument asks for a gradient.
            asks = any(isinstance(arg, torch.Tensor) and arg.requires_grad for arg in args)
            with region(), torch.set_grad_enabled(asks and torch.is_grad_enabled()):
                return function(*args)

    def around(
        _: Any, _preserve: bool, contexts: Any, *_args: Any, **_kwargs: Any
    ) -> Iterator[None]:
        forward, _again = contexts()
        with region(), nullcontext() if isinstance(forward, TorchDispatchMode) else forward:
            yield

    with (
        patch.object(checkpoints, "CheckpointFunction", Reentrant),
        patch.object(checkpoints, "_checkpoint_without_reentrant_generator", around),
    ):
        yield


def checkpoint_of(notes: Mapping[str, Any]) -> int | None:
    """The number of the checkpoint in the notes on a node."""
    number: int | None = notes.get(_CHECKPOINT)
    return number
