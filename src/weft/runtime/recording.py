"""The acts of a rank's queues in a step and their times: always recorded, read on request.

A queue appends a tuple for each act to a list of its own, on its own thread. Everything else, such
as what a queue waited for, follows from these times and the plan (`weft.program.inspect`).
"""

from __future__ import annotations

import threading
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter_ns
from typing import Any, NamedTuple, TypeAlias, final

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.actors import Act
from weft.ir.alias import Kind

# The record that a queue appends after each act: the act, and when it began and ended, in nanoseconds of
# `perf_counter_ns`: on Linux the same clock in all processes of a host.
Span: TypeAlias = "tuple[Act, int, int]"


@final
class Interval(NamedTuple):
    """A step of one executor, the program's number of the step, and its times in nanoseconds of `perf_counter_ns`."""

    step: int
    begin: int
    end: int
    number: int


@final
@dataclass(frozen=True)
class Record:
    """The record of a rank's acts."""

    steps: tuple[Interval, ...]
    spans: tuple[Span, ...]


@final
class Recorder:
    """Holds what the queues of one rank did in the last step, or in all steps while `keeping`.

    Args:
        rows: to which the queues append, each to one.
        read: gives the spans of the last step where a device knows them, and waits for its end; while `keeping`, the
            host waits for every step, whose events are used again.
    """

    def __init__(
        self, rows: Iterable[list[Span]], read: Callable[[int], Sequence[Span]] | None = None
    ) -> None:
        self.keeping = False
        self._rows = tuple(rows)
        self._read = read
        self._steps: list[Interval] = []
        self._begun = 0
        self._unread = False

    def begin(self) -> None:
        """A step begins: forget those before, unless they are kept."""
        if not self.keeping:
            self.clear()
        self._begun = perf_counter_ns()

    def end(self, step: int, number: int) -> None:
        """The step has ended, or is on its way; `number` is that of the program."""
        self._steps.append(Interval(step, self._begun, perf_counter_ns(), number))
        self._unread = True
        if self.keeping:
            self._read_last()

    def clear(self) -> None:
        """Forget everything."""
        self._steps.clear()
        self._unread = False
        for row in self._rows:
            row.clear()

    def record(self) -> Record:
        """The record that is held now, without a step that failed; call it between two steps."""
        self._read_last()
        ended = {interval.step for interval in self._steps}
        spans = (span for row in self._rows for span in row if span[0].step in ended)
        return Record(tuple(self._steps), tuple(spans))

    def _read_last(self) -> None:
        if self._read is None or not self._unread:
            return
        self._unread = False
        last = self._steps[-1]
        spans = self._read(last.step)
        self._rows[0].extend(spans)
        begin = min((begin for _, begin, _ in spans), default=0)
        self._steps[-1] = last._replace(begin=begin, end=max((end for *_, end in spans), default=0))


# The tensors of one rank as they come and go, seen from outside: who measures pays, nobody else.
#
# A dispatch mode sees what every op makes; a weak reference to each storage tells when it goes. Only
# tensors count, not what a kernel takes for itself while it runs.


_here = threading.local()


@final
@dataclass(slots=True, eq=False)
class MemoryMeter:
    """Records the storages that are made while `watching`, on any thread.

    Attributes:
        events: (number of a storage, bytes that come or go), in the order of time.
        alive: the storages that are alive: number, size, and what tells of the end, by the id of
            the Python object, which lives as long as the storage.
    """

    events: list[tuple[int, int]] = field(default_factory=list)
    kinds: list[Kind] = field(default_factory=list)
    alive: dict[int, tuple[int, int, Any]] = field(default_factory=dict)
    _lock: threading.RLock = field(default_factory=threading.RLock)

    @contextmanager
    def watching(self, kind: Kind) -> Iterator[None]:
        """Record what ops of this thread make meanwhile, as `kind`."""
        _here.meter, _here.kind = self, kind
        try:
            with _Watch(self, kind):
                yield
        finally:
            _here.meter = None

    def see(self, tensor: Tensor, kind: Kind) -> None:
        """Record the storage of a tensor, unless it is known."""
        storage = tensor.untyped_storage()
        key, size = id(storage), storage.nbytes()
        with self._lock:
            if key not in self.alive:
                number = len(self.kinds)
                end = weakref.ref(storage, lambda _: self._gone(key))
                self.kinds.append(kind)
                self.alive[key] = (number, size, end)
                self.events.append((number, size))

    def mark(self, tensor: Tensor, kind: Kind) -> None:
        """Say of what kind a storage is that ops have made."""
        known = self.alive.get(id(tensor.untyped_storage()))
        if known is not None:
            self.kinds[known[0]] = kind

    def number(self, tensor: Tensor) -> int | None:
        """The number of a tensor's storage, if it was made while watching."""
        known = self.alive.get(id(tensor.untyped_storage()))
        return None if known is None else known[0]

    def most(self, lasting: Mapping[Kind, int], left_out: Collection[int | None]) -> Counter[Kind]:
        """Bytes by kind at the moment when they were most in total."""
        now = Counter(lasting)
        most, total, highest = Counter(now), 0, 0
        for number, size in self.events:
            if number in left_out or self.kinds[number] == "host":
                continue
            now[self.kinds[number]] += size
            total += size
            if total > highest:
                most, highest = Counter(now), total
        return most

    def _gone(self, key: int) -> None:
        with self._lock:
            number, size, _ = self.alive.pop(key)
            self.events.append((number, -size))


def note_kind(tensors: Iterable[Tensor], kind: Kind) -> None:
    """Have these count as of a kind, if this thread's tensors are measured."""
    meter = getattr(_here, "meter", None)
    if meter is not None:
        for tensor in tensors:
            meter.mark(tensor, kind)


def note_made(tensors: Iterable[Tensor]) -> None:
    """Record what was made without an op that a dispatch mode sees, if this thread is measured."""
    meter = getattr(_here, "meter", None)
    if meter is not None:
        for tensor in tensors:
            meter.see(tensor, _here.kind)


@final
class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's base is untyped
    def __init__(self, meter: MemoryMeter, kind: Kind) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._meter = meter
        self._kind = kind

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            self._meter.see(tensor, self._kind)
        return result


def _tensors(result: Any) -> Iterator[Tensor]:
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for part in result:
            yield from _tensors(part)
