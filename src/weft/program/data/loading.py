"""Batches loaded ahead of the steps by the actors of a plan: one thread for each queue but that of the step.

    load    on "load"     takes the next batch of the loader's workers
    copy    on "copies"   cuts it to the parts of the ranks of this process, on their devices
    step    on "compute"  hands them to the thread that steps

They act once a step, and begin a step of their own as soon as they have ended the one before; the credits of registers
alone say how far they are ahead, and hold them back where steps are slow. With credits for one batch alone there is no
copy: the step cuts what was loaded.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from itertools import count
from time import monotonic, perf_counter_ns
from typing import Any, NamedTuple, final

from torch import Tensor

from weft.actors import Begin, QueueMachine
from weft.actors.wiring import equal_registers
from weft.ir.legal.plans import verify_plan
from weft.ir.plan import (
    COMPUTE,
    Actor,
    Compute,
    Feed,
    Fetch,
    LocalCall,
    LocalValue,
    RankPlan,
    Register,
    RegisterKind,
)
from weft.layout.layout import region_shape
from weft.program.data.feed import LoadedLeaf
from weft.runtime.executor.queues import ActError, Control, Queue, Stop
from weft.runtime.executor.work import Work
from weft.runtime.recording import Span
from weft.units import Seconds

# The queues beside that of the step.
LOAD, COPIES = "load", "copies"
# Stands where a batch has no tensors: the actors wait for each other all the same.
_EMPTY = ((0,), "bool")


def loading_plan(rank: int, leaves: Sequence[LoadedLeaf], ahead: int) -> RankPlan:
    """The plan by which a process, whose first rank is `rank`, loads the leaves of its batches.

    `ahead`: how many batches may be loaded before their step, from 1: the credits of all registers together.
    """
    cuts = ahead > 1
    loaded = [LocalValue(each.name, each.shape, each.dtype) for each in leaves]
    kind: RegisterKind = "batch" if loaded else "control"
    loaded = loaded or [LocalValue("batch", *_EMPTY)]
    names = tuple(value.name for value in loaded)
    keys = tuple(each.key for each in leaves) or ("batch",)
    feed = Feed(0, keys, names, LOAD)
    if not cuts:
        fetch = Fetch(1, keys, names, COMPUTE)
        registers = [Register(value, kind, 0, (1,), ahead) for value in loaded]
        return verify_plan(RankPlan(rank, (), (feed, fetch), tuple(registers)))
    parts = list(_parts(leaves, names))
    made = [value for _, _, value in parts] or [LocalValue("parts", *_EMPTY)]
    taken = tuple(value.name for value in made)
    told = tuple(key for key, _, _ in parts) or ("parts",)
    copy = Compute(1, tuple(call for _, call, _ in parts), names, taken, COPIES)
    fetch = Fetch(2, told, taken, COMPUTE)
    registers = [Register(value, kind, 0, (1,), ahead - 1) for value in loaded]
    kind = "batch" if parts else "control"
    registers += [Register(value, kind, 1, (2,)) for value in made]
    return verify_plan(RankPlan(rank, (), (feed, copy, fetch), tuple(registers)))


def _parts(
    leaves: Iterable[LoadedLeaf], taken: Collection[str]
) -> Iterator[tuple[str, LocalCall, LocalValue]]:
    known = set(taken)
    for leaf in leaves:
        for rank, region in leaf.parts.items():
            name = f"rank{rank}.{leaf.name}"
            while name in known:  # a leaf of the user's is called so
                name += "_"
            known.add(name)
            part = LocalValue(name, region_shape(region), leaf.dtype)
            kwargs = (("device", leaf.devices[rank]),) if rank in leaf.devices else ()
            call = LocalCall.of(
                "weft.part",
                (LocalValue(leaf.name, leaf.shape, leaf.dtype).ref, region),
                (part,),
                kwargs=kwargs,
            )
            yield f"{leaf.key} of rank {rank}", call, part


# For so long threads are waited for that still load when nobody wants more.
PATIENCE = Seconds(5.0)


@final
class LoadingActs(NamedTuple):
    """The acts that have brought one batch to its step: their plan, the number of the step in that, and their spans.

    Each run has a plan of its own, in which steps count from 0.
    """

    plan: RankPlan
    number: int
    spans: tuple[Span, ...]


@final
class PrefetchedBatches(NamedTuple):
    """The way of batches to their steps, if some are loaded ahead.

    Attributes:
        plan: given the rows of a batch that this process loads (None for all), of `loading_plan`.
        cut: cuts a batch for its step, on another thread than that of the steps.
        note: is told the acts of each batch, before its step, on the thread of the steps.
    """

    plan: Callable[[Sequence[int] | None], RankPlan]
    cut: Callable[[Any], Any]
    note: Callable[[LoadingActs], None]


def prefetched(
    items: Iterator[Any],
    plan: RankPlan,
    cut: Callable[[Any], Any],
    note: Callable[[LoadingActs], None],
) -> Iterator[Any]:
    """The same items in the same order, each cut, as the actors of a plan bring them.

    An error of `items` is raised at its place. Threads end with the iterator that is returned, and drop what was not
    asked for.

    Args:
        plan: of `loading_plan`.
        cut: makes of an item what its step is given; must not raise. Called by a thread, where the plan has a copy.
        note: is told the acts of each item before the item is given.
    """
    loading = _Loading(items, plan, cut)
    try:
        loading.start()
        for number, item in enumerate(loading.taken()):
            note(LoadingActs(plan, number, loading.spans(number)))
            yield item
    finally:
        loading.end()


def with_waits(items: Iterable[Any], note: Callable[[int, int], None]) -> Iterator[Any]:
    """The same items; `note` hears before each when the wait for it began and ended, of `perf_counter_ns`."""
    begun = perf_counter_ns()
    for item in items:
        note(begun, perf_counter_ns())
        yield item
        begun = perf_counter_ns()


@final
class _End:
    """Stands after the last item; `error` is what the iterator raised."""

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error


@final
class _Unwanted(BaseException):
    """The thread that loads has ended: nobody wants more."""


@final
class _Loading:
    """The queues of a plan of `loading_plan`: a whole item passes in place of all leaves; `cut` must not raise."""

    def __init__(self, items: Iterator[Any], plan: RankPlan, cut: Callable[[Any], Any]) -> None:
        self._items: Iterator[Any] | None = items
        self._cut = cut
        # The batch last handed to the step, until it is passed on.
        self._handed: list[Any] = []
        # True once the last item is loaded, or the items have raised: the actors begin no further step.
        self._over = False
        self._unwanted = False
        self._failure: BaseException | None = None
        self._queues: dict[str, Queue] = {}
        self._threads: list[threading.Thread] = []
        alike = equal_registers(plan)
        calls = {LOAD: self._load, COPIES: self._copy, COMPUTE: self._handed.append}
        works = {actor.id: _work(actor, alike, calls[actor.queue]) for actor in plan.actors}
        for name in plan.on_queue:
            machine = QueueMachine(plan, name, in_order=name != COMPUTE, alike=alike)
            own = {actor.id: works[actor.id] for actor in plan.on_queue[name]}
            Queue(machine, own, self._queues, self._ended(name), self._stop)
        self._compute = self._queues[COMPUTE]
        self._others = [queue for name, queue in self._queues.items() if name != COMPUTE]

    def start(self) -> None:
        for queue in self._others:
            name = f"weft {queue.name}"
            thread = threading.Thread(target=self._serve, args=(queue,), name=name, daemon=True)
            thread.start()
            self._threads.append(thread)
            queue.post(Begin(0))

    def taken(self) -> Iterator[Any]:
        """The items, in order."""
        for step in count():
            compute = self._compute
            compute.receive(Begin(step))
            while not self._handed:
                compute.receive(compute.mailbox.get())
            compute.call()
            if isinstance(self._handed[0], _End):
                break
            yield self._handed.pop()
        error = self._handed.pop().error
        if error is not None:
            raise error

    def spans(self, step: int) -> tuple[Span, ...]:
        """The spans of a step's acts, once it was handed over; they are told once, step after step."""
        found: list[Span] = []
        for queue in self._queues.values():
            row = queue.work.spans
            # The thread of the queue may append meanwhile.
            while row and row[0][0].step <= step:
                found.append(row.pop(0))
        return tuple(found)

    def end(self) -> None:
        """End the threads, be it that one loads, and drop all that was not asked for."""
        self._unwanted = True
        until = monotonic() + PATIENCE
        for queue in self._others:
            queue.post(Stop())
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(max(0.0, until - monotonic()))
        # Queues know each other: without this, memory and workers would wait for the garbage collector.
        for queue in self._queues.values():
            queue.work.tensors.clear()
        self._handed.clear()
        self._items, self._cut = None, _nothing

    def _load(self, item: None) -> Any:
        """Take the next item; what is in its place where there is none."""
        try:
            found = _End() if self._items is None else next(self._items)
        except StopIteration:
            found = _End()
        except BaseException as error:
            self._over = True
            return _End(error)
        if self._unwanted:
            raise _Unwanted
        self._over = isinstance(found, _End)
        return found

    def _copy(self, item: Any) -> Any:
        return item if isinstance(item, _End) else self._cut(item)

    def _ended(self, name: str) -> Callable[[int], None]:
        """The call of a queue that has ended a step: it begins the next one. The queue of the step waits to be
        asked.
        """

        def begin_next(step: int) -> None:
            if name != LOAD or not self._over:
                self._queues[name].mailbox.put(Begin(step + 1))

        return _nothing if name == COMPUTE else begin_next

    def _stop(self, message: Control) -> None:
        raise self._failure or _Unwanted

    def _serve(self, queue: Queue) -> None:
        try:
            while True:
                queue.serve()
        except BaseException as error:
            # The thread of a queue has ended; where nobody asked it to, the step's queue raises why. No name of this
            # frame may hold the error: its traceback holds the frame, and with it the batch, until a collection.
            if not self._unwanted:
                self._failure = (error.__cause__ if isinstance(error, ActError) else None) or error
                self._compute.mailbox.put(Stop())


def _work(actor: Actor, alike: Mapping[str, str], call: Callable[[Any], Any]) -> Work:
    """The work of an actor, on the whole item: it passes in the register that stands for all that are alike."""
    reads = tuple(dict.fromkeys(alike[name] for name in actor.consumes))
    writes = tuple(dict.fromkeys(alike[name] for name in actor.produces))

    def act(step: int, micro: int, inputs: list[Tensor]) -> Sequence[Tensor]:
        made = call(inputs.pop() if inputs else None)
        return (made,) if writes else ()

    return Work(reads, writes, act, sole=frozenset(reads))


def _nothing(_: Any) -> None:
    pass
