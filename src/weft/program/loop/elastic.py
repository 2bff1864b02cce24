"""`weft.elastic`: work that goes on in the processes that are left when ranks are lost."""

from __future__ import annotations

import gc
import random
import threading
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, TypeVar, final

import numpy as np
import torch
import torch.distributed as dist

from weft.errors import RankFailure, UserError, shown
from weft.program.live.holds import open_programs
from weft.runtime.world.distributed import end_lasting_worlds, give_up, lasting_worlds
from weft.runtime.world.in_place.follower import LISTENS, Follower, follower
from weft.runtime.world.world import World
from weft.tensor.mesh import forget_world
from weft.units import Seconds

T = TypeVar("T")


def elastic(train: Callable[[], T]) -> T:
    """Call a function, and call it again where ranks are lost and this one goes on in place. Every process calls it.

    Under `weft run --restarts` on one node of CPUs the processes that are left need not start again when another one
    is ended by a signal, leaves, or does not answer: what they wait for ends with an error, the world is closed, and
    the function runs again among the ranks of the new world, whose number and size stand in `RANK` and `WORLD_SIZE`,
    with the number of the start in `WEFT_RESTART`. Python's, numpy's and torch's random generators stand then as they
    stood before the first call. Elsewhere, and where that cannot be, `weft run` starts all ranks again; without it, the
    function is only called.

    Args:
        train: makes model, optimizer, loaders and programs, and whatever else a step changes, itself; begins with
            `Checkpoints.load_newest`, or calls `weft.fit`, to go on where the run was. It must let errors pass.

    Returns:
        What the function returns.

    Raises:
        UserError: `train` cannot be called, or the ranks have met before, as `weft.compile` has them do.
        RankFailure: others are lost, and all ranks start again.
    """
    if not callable(train):
        raise UserError(f"weft.elastic takes a function without arguments, found {shown(train)}")
    following = follower()
    if following is None:
        return train()
    if lasting_worlds() or dist.is_initialized():
        raise UserError(
            "weft.elastic: the ranks have met before it was called, by weft.compile, a global tensor, or "
            "torch.distributed.init_process_group; a process that takes a lost one's place would not meet them there: "
            "do that in the function that weft.elastic is given"
        )
    return _until_it_ends(train, following)


def _until_it_ends(train: Callable[[], T], following: Follower) -> T:
    generators = _Generators.now()
    following.enter(give_up)
    try:
        while True:
            try:
                return train()
            except Exception as error:
                if not following.goes_on(error):
                    raise
                why = f"{type(error).__name__}: {error}"
                _let_go(error)
            if not following.renew(end_old_world()):
                raise RankFailure(f"the ranks do not go on in place, and start again: {why}")
            generators.put_back()
    finally:
        following.leave()


def _let_go(error: BaseException | None) -> None:
    """Let go of all that the frames hold through which an error came, and the errors behind it."""
    seen = set[int]()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        traceback.clear_frames(error.__traceback__)
        error.__traceback__ = None
        error = error.__cause__ or error.__context__


@final
@dataclass(frozen=True)
class _Generators:
    """The states of Python's, numpy's and torch's random generators on the host."""

    python: Any
    numpy: Any
    torch: torch.Tensor

    @staticmethod
    def now() -> _Generators:
        """The states as they are."""
        return _Generators(random.getstate(), np.random.get_state(), torch.get_rng_state())

    def put_back(self) -> None:
        """Let the generators go on from these states."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)
        torch.set_rng_state(self.torch)


# For which threads are waited that still work for the old world.
_PATIENCE = Seconds(2.0)


def end_old_world() -> str:
    """Close the programs of this process, its channels, worlds and process groups, and see that no thread works on.

    Returns:
        Why that cannot be, as a thread that hangs could write into what the new world reads; "" where it was done.
    """
    worlds = lasting_worlds()
    if any(world.device_type != "cpu" for world in worlds):
        return "work on devices that are not CPUs cannot be ended in place"
    for program in open_programs():
        with suppress(Exception):  # of its threads, which have lost their peers
            program.close()
    for world in worlds:
        _forget(world)
    end_lasting_worlds()
    gc.collect()
    return _left(time.monotonic() + _PATIENCE)


def _forget(world: World) -> None:
    with suppress(Exception):
        forget_world(world)


def _left(until: float) -> str:
    """The name of a thread of weft's that still works at a time of the clock; "" where there is none."""
    own = threading.current_thread()
    for thread in threading.enumerate():
        if thread is not own and thread.name.startswith("weft ") and thread.name != LISTENS:
            thread.join(max(0.0, until - time.monotonic()))
            if thread.is_alive():
                return f"the thread {thread.name!r} still works"
    return ""
