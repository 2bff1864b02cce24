"""The end of a world whose ranks are not all there any more, in a process that is to go on in another one."""

from __future__ import annotations

import gc
import threading
import time
from contextlib import suppress

from weft.program.live.holds import open_programs
from weft.runtime.world.distributed import end_lasting_worlds, lasting_worlds
from weft.runtime.world.in_place.follower import LISTENS
from weft.runtime.world.world import World
from weft.tensor.mesh import forget_world
from weft.units import Seconds

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
