"""The tensors of a rank at run time: variables as local ones, and those that pass between `step` and its actors."""

from __future__ import annotations

import threading
from collections import ChainMap, deque
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, final

import torch
from torch import Tensor

from weft.errors import InternalError
from weft.layout import Layout, Region


@final
class Kept:
    """The state that an optimizer keeps on one rank: for each parameter its own dict of tensors and numbers.

    Attributes:
        known: the same as it was when it was kept: an optimizer may put other tensors into its dicts.
        version: another number as soon as an entry is replaced by another dict, or has other tensors.
    """

    def __init__(self) -> None:
        self.entries: dict[str, dict[str, Any]] = {}
        self.known: dict[str, dict[str, Any]] = {}
        self.version = 0


@final
class Variables(Mapping[str, Tensor]):
    """One rank's shards by the name that users know; shared by the executors of that rank.

    A tensor stays the same object for good, because kernels hold on to it: new values are written
    into it. Only what the optimizer keeps may be replaced. The states of parameter `p` have the
    names `p.exp_avg`, `p.step`, ….

    Attributes:
        parameters: by key, the user's parameters, whose attributes an optimizer of the user's may go by.
        gradients: by parameter, the sum of the gradients of steps whose update is still to come.
    """

    def __init__(self, tensors: Mapping[str, Tensor] | None = None) -> None:
        self.kept = Kept()
        self.parameters: dict[str, Tensor] = {}
        self.gradients: dict[str, Tensor] = {}
        self._tensors: MutableMapping[str, Tensor] = dict(tensors or {})

    def __getitem__(self, key: str) -> Tensor:
        return self._tensors[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    def with_constants(self, constants: Mapping[str, Tensor]) -> Variables:
        """The same variables, for a plan that reads some constants too; what is added to either is in both."""
        seen = Variables()
        seen.__dict__.update(self.__dict__)
        seen._tensors = ChainMap(self._tensors, dict(constants))
        return seen

    def add(self, key: str, tensor: Tensor) -> None:
        """Put a new variable."""
        if self._tensors.setdefault(key, tensor) is not tensor:
            raise InternalError(f"the variable {key} exists already")

    def keeps(self, parameter: str, entries: dict[str, Any]) -> bool:
        """True if this is what the optimizer keeps for a parameter, with the tensors that are known."""
        known = self.kept.known.get(parameter, {})
        return (
            self.kept.entries.get(parameter) is entries
            and known.keys() == entries.keys()
            and all(
                x is known[name]
                for name, x in entries.items()
                if isinstance(x, Tensor) or isinstance(known[name], Tensor)
            )
        )

    def keep(self, parameter: str, entries: dict[str, Any] | None) -> None:
        """Put what the optimizer keeps for a parameter in place of what it kept; None if it has not stepped yet."""
        self.kept.entries.pop(parameter, None)
        for name in self.kept.known.pop(parameter, {}):
            self._tensors.pop(f"{parameter}.{name}", None)
        if entries is not None:
            self.kept.entries[parameter], self.kept.known[parameter] = entries, dict(entries)
            tensors = {f"{parameter}.{n}": x for n, x in entries.items() if isinstance(x, Tensor)}
            self._tensors.update(tensors)
        self.kept.version += 1

    def write(self, key: str, value: Tensor) -> None:
        """Give a variable a new value, in place."""
        self._tensors[key].detach().copy_(value)


@final
@dataclass
class Batches:
    """The tensors that pass between `step` and the actors: a batch in, results out, by key.

    `held` says that the running step keeps its gradients for a later one and updates no parameter;
    `updated` says that it has updated parameters, or added gradients to those that are kept;
    `first` is how many steps other plans of the run have made before this one's step 0, for the random ops.
    """

    fed: Mapping[str, Tensor] = field(default_factory=dict)
    fetched: dict[str, Tensor] = field(default_factory=dict)
    held: bool = False
    updated: bool = False
    first: int = 0


def region_part(tensor: Tensor, region: Region) -> Tensor:
    """A region of a tensor, as a view; the tensor itself when it is all of it."""
    for dim, (offset, length) in enumerate(region):
        if length != tensor.shape[dim]:
            tensor = tensor.narrow(dim, offset, length)
    return tensor


def local_part(tensor: Tensor, layout: Layout, rank: int) -> Tensor:
    """The part of a whole tensor that `rank` holds, as a view."""
    return region_part(tensor, layout.local_ranges(tuple(tensor.shape), rank))


# Copies to host memory and back on a stream of their own, beside what the device computes.
#
# The memory of what is copied out must not be given out again before the copy has ended, and the
# host, which is far ahead, cannot tell when that is. So the stream that computes waits: for each copy
# out when the next one begins, and for all of them before anything is loaded. Until then the tensor
# is held: one more than the plan says.


# torch does not type them.
_event: Any = torch.cuda.Event
_new_stream: Any = torch.cuda.Stream

_here = threading.local()


@final
class Copies:
    """The copies of one thread to and from one device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = _new_stream(device)
        # Tensors being copied out, each with its event; the oldest first.
        self._out: deque[tuple[Tensor, Any]] = deque()

    def out(self, x: Tensor) -> Tensor:
        """A copy of `x` in pinned memory, on its way."""
        host = torch.empty_like(x, device="cpu", pin_memory=x.is_cuda)
        self._out.append((x, self._copy(host, x)))
        self._await(1)
        return host

    def back(self, host: Tensor) -> Tensor:
        """A copy of what `out` made, on the device, ready for the current stream."""
        self._await(0)
        x = torch.empty_like(host, device=self._device)
        self._current().wait_event(self._copy(x, host))
        return x

    def _copy(self, into: Tensor, source: Tensor) -> Any:
        """Copy when all that was computed so far is done: the source, and what stood in `into`'s memory."""
        ready, done = _event(), _event()
        ready.record(self._current())
        self._stream.wait_event(ready)
        with torch.cuda.stream(self._stream):
            into.copy_(source, non_blocking=True)
        done.record(self._stream)
        return done

    def _await(self, left: int) -> None:
        """Have the current stream wait for all copies out but the last few, and let go of what they copied."""
        while len(self._out) > left:
            _, done = self._out.popleft()
            self._current().wait_event(done)

    def _current(self) -> Any:
        return torch.cuda.current_stream(self._device)


def to_host(x: Tensor) -> Tensor:
    """A copy in host memory; of a device with streams in pinned memory, on its way while others compute."""
    return copies(x.device).out(x) if x.is_cuda else torch.empty_like(x).copy_(x)


def from_host(host: Tensor, device: torch.device) -> Tensor:
    """A copy of what `to_host` made, on the device, ready for what is computed next."""
    if device.type == "cuda":
        return copies(device).back(host)
    return torch.empty_like(host, device=device).copy_(host)


def laid(tensor: Tensor, device: torch.device) -> Tensor:
    """Contiguous, with its own elements, on a device; nothing is copied that is so already."""
    if device.type == "cuda" and tensor.device.type == "cpu":
        # From pinned memory the host need not wait for the copy; it is our own, since the caller
        # may overwrite the batch.
        pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return pinned.copy_(tensor).to(device, non_blocking=True)
    if tensor.device != device:
        tensor = tensor.to(device)
    return tensor.contiguous().resolve_conj().resolve_neg()


def copies(device: torch.device) -> Copies:
    """The copies of this thread for a device."""
    known: dict[torch.device, Copies] = _here.__dict__.setdefault("copies", {})
    if device not in known:
        known[device] = Copies(device)
    return known[device]


# Copies to devices ahead of their use, on streams of their own, which the reader's stream waits for.
#
# A thread that copies ahead has no part in the streams that compute. They wait for an event after its copies; and the
# memory of these, which belongs to the stream of the copies, must not be given out again before they have read it.


_current: Any = torch.cuda.current_stream  # torch does not type it


@final
class Arrival:
    """The end of all that was put on its way in one `prefetching_copies`: an event for each device with streams."""

    def __init__(self) -> None:
        self.events: Mapping[torch.device, Any] = {}

    def wait_for(self, tensors: Iterable[Tensor]) -> None:
        """Have the current streams wait for it, and its memory for them."""
        for device, event in self.events.items():
            _current(device).wait_event(event)
        for tensor in tensors if self.events else ():
            if tensor.device in self.events:
                tensor.record_stream(_current(tensor.device))


@contextmanager
def prefetching_copies(devices: Iterable[torch.device]) -> Iterator[Arrival]:
    """Within the context, copies of this thread to some devices go to streams of their own."""
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
    known: dict[torch.device, Any] = _here.__dict__.setdefault("streams", {})
    if device not in known:
        known[device] = _new_stream(device)
    return known[device]
