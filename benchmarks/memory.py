"""The most that one process and its tensors take in a step, counted alike for every system."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

from torch import Tensor, UntypedStorage, nn
from torch.profiler import ProfilerActivity, profile, record_function

# Exact types: wrappers such as DTensor and fake tensors hold no memory of their own.
MARK = "the step that counts"
KINDS = (Tensor, nn.Parameter, nn.Buffer)
# What the kernel says of this process; "5" resets the most that was resident (proc(5)).
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")


def resident_bytes(most: bool = False) -> int:
    """Bytes of this process that are resident, shared memory that it has touched included; or the most that were."""
    name = "VmHWM:" if most else "VmRSS:"
    (kib,) = (line.split()[1] for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(kib) * 1024


def peak_resident_bytes(step: Callable[[], object]) -> int:
    """The most bytes of this process that are resident within a step."""
    CLEAR.write_text("5")
    step()
    return resident_bytes(most=True)


def peak_bytes(step: Callable[[], object]) -> int:
    """Bytes of all tensors of this process at their most within a step.

    What lives between steps is found through Python; what a step takes and gives back, within
    kernels too, through torch's profiler: on this thread and those of autograd, but not on others.

    Args:
        step: a step that has run before, so that everything lasting is there.
    """
    with silence(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()  # the profiler knows the size of what it has seen made
        with record_function(MARK):
            step()
    held = {storage.data_ptr(): storage.nbytes() for storage in live_storages()}
    changes = allocations(profiler)
    return sum(held.values()) + max(accumulate(changes, initial=0))


@contextmanager
def silence() -> Iterator[None]:
    """Drops what the profiler's library writes beside Python."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def live_storages() -> Iterator[UntypedStorage]:
    """The storages of all tensors that Python knows, on the CPU, but for views of memory that is not torch's.

    Those are the buffers of transports.
    """
    gc.collect()
    for each in gc.get_objects():
        if type(each) in KINDS and each.device.type == "cpu":
            storage = each.untyped_storage()
            if storage.resizable():
                yield storage


def allocations(profiler: profile) -> list[int]:
    """What was allocated, and, as a negative number, given back, since the mark, in the order of time."""
    results: Any = profiler.profiler
    events = list(flat(results.kineto_results.experimental_event_tree()))
    (start,) = (event.start_time_ns for event in events if event.name == MARK)
    found = [event for event in events if event.name == "[memory]" and event.start_time_ns > start]
    found.sort(key=lambda event: event.start_time_ns)
    return [int(event.extra_fields.alloc_size) for event in found]


def flat(events: Iterable[Any]) -> Iterator[Any]:
    """Events with those within them."""
    waiting = list(events)
    while waiting:
        event = waiting.pop()
        waiting.extend(event.children)
        yield event
