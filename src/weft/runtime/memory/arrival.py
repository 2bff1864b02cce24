"""Copies to devices ahead of their use, on streams of their own, which the reader's stream waits for.

A thread that copies ahead has no part in the streams that compute. What it puts on its way there is ready for them once
they wait for an event behind it; and its memory, which belongs to the stream of the copies, must not be given out again
before they have read it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, final

import torch
from torch import Tensor

# torch does not type them.
_event: Any = torch.cuda.Event
_stream: Any = torch.cuda.Stream
_current: Any = torch.cuda.current_stream

_here = threading.local()


@final
class Arrival:
    """The end of all that was put on its way in one `ahead_of_use`.

    Attributes:
        events: for each device, the event behind it; none of devices without streams.
    """

    def __init__(self) -> None:
        self.events: Mapping[torch.device, Any] = {}

    def wait_for(self, tensors: Iterable[Tensor]) -> None:
        """Have the current streams wait for it, and its memory for them.

        Args:
            tensors: all that was put on its way.
        """
        for device, event in self.events.items():
            _current(device).wait_event(event)
        for tensor in tensors if self.events else ():
            if tensor.device in self.events:
                tensor.record_stream(_current(tensor.device))


@contextmanager
def ahead_of_use(devices: Iterable[torch.device]) -> Iterator[Arrival]:
    """While this lasts, copies of this thread to some devices go to streams of their own.

    Args:
        devices: of any kind; those without streams have nothing to wait for.
    """
    streams = {device: _stream_of(device) for device in devices if device.type == "cuda"}
    arrival = Arrival()
    with ExitStack() as entered:
        for stream in streams.values():
            entered.enter_context(torch.cuda.stream(stream))
        yield arrival
        events = {}
        for device, stream in streams.items():
            events[device] = _event()
            events[device].record(stream)
        arrival.events = events


def _stream_of(device: torch.device) -> Any:
    """The stream of this thread for copies to a device."""
    known: dict[torch.device, Any] = _here.__dict__.setdefault("streams", {})
    if device not in known:
        known[device] = _stream(device)
    return known[device]
