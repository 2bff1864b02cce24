"""Copies to the host and back: with stand-ins for streams, no memory is given out before it was read."""

from __future__ import annotations

import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from weft.runtime.memory import state as cuda_copies
from weft.runtime.memory.state import Copies, copies


class Stream:
    """Knows the numbers of all events that come before what is put on it next."""

    def __init__(self, device: Any = None) -> None:
        self.known: set[int] = set()

    def wait_event(self, event: Event) -> None:
        self.known |= event.known


class Event:
    count = 0

    def record(self, stream: Stream) -> None:
        Event.count += 1
        self.number = Event.count
        stream.known.add(self.number)
        self.known = set(stream.known)


@pytest.fixture
def compute(monkeypatch: pytest.MonkeyPatch) -> Stream:
    stream = Stream()
    monkeypatch.setattr(cuda_copies, "_event", Event)
    monkeypatch.setattr(cuda_copies, "_new_stream", Stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    Event.count = 0
    return stream


def test_what_is_copied_out_is_held_until_compute_has_waited(compute: Stream) -> None:
    moving = Copies(torch.device("cpu"))
    tensors = [torch.full((4,), float(number)) for number in range(3)]
    held = [weakref.ref(tensor) for tensor in tensors]
    hosts = []
    ends = []
    while tensors:
        hosts.append(moving.out(tensors.pop(0)))
        ends.append(Event.count)
        # The copy begins after all that was computed before.
        assert moving._stream.known >= {ends[-1] - 1}
    # Each waits for the one before: the last one still goes on beside compute.
    assert [ref() is None for ref in held] == [True, True, False]
    assert compute.known >= set(ends[:2])
    assert ends[2] not in compute.known
    back = moving.back(hosts[0])
    assert back.tolist() == [0.0] * 4
    assert held[2]() is None
    assert compute.known >= {ends[2], Event.count}


def test_a_thread_has_one_stream_for_each_device(compute: Stream) -> None:
    one, other = torch.device("cpu"), torch.device("cuda", 0)
    assert copies(one) is copies(one) is not copies(other)
    cuda_copies._here.__dict__.clear()
