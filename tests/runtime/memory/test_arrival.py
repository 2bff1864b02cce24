"""Copies to a device ahead of their use: the reader waits for them, and keeps their memory; with stand-ins."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from weft.runtime.memory import state as copies
from weft.runtime.memory.state import prefetching_copies

GPU = torch.device("cuda", 0)


class Stream:
    """Notes what it is told to wait for."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.waits = device, list[Any]()

    def wait_event(self, event: Any) -> None:
        self.waits.append(event)


class Event:
    def __init__(self) -> None:
        self.stream: Any = None

    def record(self, stream: Any) -> None:
        self.stream = stream


class Part:
    """A tensor of a device, as far as this goes."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.readers = device, list[Any]()

    def record_stream(self, stream: Any) -> None:
        self.readers.append(stream)


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> list[Stream]:
    """The streams that are current, the caller's first."""
    current = [Stream(GPU)]

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(copies, "_here", threading.local())
    monkeypatch.setattr(copies, "_event", Event)
    monkeypatch.setattr(copies, "_new_stream", Stream)
    monkeypatch.setattr(copies, "_current", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    return current


def test_the_reader_waits_and_keeps_the_memory(streams: list[Stream]) -> None:
    (reader,) = streams
    parts: Any = [Part(GPU), Part(torch.device("cpu"))]
    with prefetching_copies([GPU, torch.device("cpu")]) as found:
        (_, own) = streams
    assert streams == [reader]
    assert own is not reader
    found.wait_for(parts)
    (event,) = reader.waits
    assert event.stream is own
    assert [part.readers for part in parts] == [[reader], []]
    assert not own.waits
    with prefetching_copies([GPU]):  # a thread has one stream for each device
        assert streams == [reader, own]


def test_on_the_host_nothing_waits(streams: list[Stream]) -> None:
    part: Any = Part(torch.device("cpu"))
    with prefetching_copies([torch.device("cpu")]) as found:
        assert len(streams) == 1
    found.wait_for([part])
    assert not streams[0].waits
    assert not part.readers
