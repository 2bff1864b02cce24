"""One queue at run time: the driver of its state machine, its works and the tensors that they pass on, its mailbox."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from queue import SimpleQueue
from threading import Lock
from time import perf_counter_ns
from typing import NamedTuple, TypeAlias, final

from torch import Tensor

from weft.actors import Act, Clock, Driver, Event, QueueMachine, Ready, Released
from weft.actors.messages import IssueSlot
from weft.ir.plan import COMPUTE
from weft.runtime.executor.work import Work
from weft.runtime.recording import Span


@final
class ActError(Exception):
    """An actor raised; `__cause__` is what it raised."""

    def __init__(self, act: Act) -> None:
        super().__init__(f"{act} raised")
        self.act = act


@final
class QueueWork:
    """Does the acts of one queue, one after the other.

    Attributes:
        tensors: what actors of this queue have yet to read, by register and version; dropped after the last of them.
            Another queue puts the registers that it makes here before it sends `Ready`.
        spans: when each act of the last step ran (`weft.runtime.recording`).
    """

    __slots__ = ("_clock", "_machine", "_works", "spans", "tensors")

    def __init__(
        self, machine: QueueMachine, works: Mapping[int, Work], clock: Clock[int] = perf_counter_ns
    ) -> None:
        self.tensors: dict[tuple[str, int], Tensor] = {}
        self.spans: list[Span] = []
        self._machine = machine
        self._works = works
        self._clock = clock

    def start(self, act: Act) -> bool:
        """Do an act."""
        work = self._works[act.actor]
        _, step, micro = act
        version = step * work.acts + micro
        begun = self._clock()
        try:
            outputs = work.act(step, micro, self._inputs(work, act, version))
        except BaseException as error:
            raise ActError(act) from error
        self.spans.append((act, begun, self._clock()))
        for name, tensor in zip(work.writes, outputs, strict=True):
            if name not in work.once:
                self.tensors[name, version] = tensor
            elif micro + 1 == work.acts:
                self.tensors[name, step] = tensor
        return True

    def free(self, register: str, version: int) -> None:
        """Drop a version that nobody here reads."""
        self.tensors.pop((register, version), None)

    def hand_on(self, register: str, version: int, reader: QueueWork) -> None:
        """Give another queue the tensor that it reads; variables are written in place and bring none."""
        key = (register, version)
        if key in self.tensors:
            reader.tensors[key] = self.tensors[key]

    def _inputs(self, work: Work, act: Act, version: int) -> list[Tensor]:
        """The inputs of an act; nobody else holds those that it is the last of this queue to read."""
        tensors = self.tensors
        if work.alone:
            return [tensors.pop((name, version)) for name in work.reads]
        inputs = []
        for name in work.reads:
            once = name in work.once
            key = (name, act.step if once else version)
            again = once and act.micro + 1 < work.acts
            last = not again and self._machine.readers_left(*key) == 1
            inputs.append(tensors.pop(key) if last else tensors[key])
        return inputs


@final
class Ended(NamedTuple):
    """To the compute queue: `queue` has done all its work of a step."""

    queue: str
    step: int


@final
class Stop(NamedTuple):
    """To a queue: start no further act; the rank has failed or closes."""


@final
class GateOpened(NamedTuple):
    """To a queue: its next act need not wait any more for the end of others."""


Control: TypeAlias = "Ended | GateOpened | Stop"
Mailbox: TypeAlias = "SimpleQueue[Event | Control]"


@final
class Queue:
    """Runs the actors of one queue, on the one thread that calls `receive`, or `serve`.

    A queue with a thread of its own is woken by its bell, and only when it has an act to run: the
    sender handles the messages (`prepare`), and may run the act itself (`act_here`).

    Args:
        on_end: called with a step when all actors of this queue have acted for it.
        on_control: called with what arrives and is not an event.
        gate: says for queues that keep an order whether the next act must wait for others; None for never.
    """

    def __init__(
        self,
        machine: QueueMachine,
        works: Mapping[int, Work],
        queues: dict[str, Queue],
        on_end: Callable[[int], None],
        on_control: Callable[[Control], None],
        gate: Gate | None = None,
    ) -> None:
        self.name = machine.queue
        self.machine = machine
        self.work = QueueWork(machine, works)
        self.driver = Driver(machine, self.work, self)
        self.mailbox: Mailbox = SimpleQueue()
        # An entry wakes the thread that serves this queue. The compute queue's thread waits for its
        # mailbox instead.
        self.bell: SimpleQueue[None] = SimpleQueue()
        # Held by whoever handles messages and runs acts, where several threads may.
        self.lock = Lock()
        # An act that another thread has started for the one that serves; under the lock.
        self.left: Act | None = None
        # Queues to which this one has sent messages that nobody was told to handle yet.
        self.told: list[Queue] = []
        self._queues = queues
        self._on_end = on_end
        self._on_control = on_control
        self._gate = gate
        queues[self.name] = self

    def receive(self, message: Event | Control) -> None:
        """Handle a message and run all acts that follow from it."""
        self._handle(message)
        self._go_on(self._next())

    def serve(self) -> None:
        """Wait for the bell, then run what was left and handle all messages."""
        self.bell.get()
        with self.lock:
            act, self.left = self.left, None
            self._go_on(act)
            while not self.mailbox.empty():
                self.receive(self.mailbox.get())
            self.call()

    def post(self, message: Event | Control) -> None:
        """Send a message from outside of the rank's queues."""
        self.mailbox.put(message)
        self.bell.put(None)

    def call(self) -> None:
        """Have handled what this queue has sent: wake the threads that have to act."""
        while self.told:
            queue = self.told.pop()
            if queue.prepare():
                queue.bell.put(None)

    def prepare(self) -> bool:
        """Handle messages on a thread of another queue, up to one that starts an act."""
        if not self.lock.acquire(blocking=False):
            return True
        try:
            while self.left is None and self._handle_next():
                self.left = self._next()
            self.call()
            return not self.rests
        finally:
            self.lock.release()

    @property
    def rests(self) -> bool:
        """True if there is nothing to handle and nothing to run; the caller holds the lock."""
        return self.left is None and self.mailbox.empty()

    def act_here(self) -> None:
        """Run the act that is left, on a thread of another queue that holds the lock."""
        act, self.left = self.left, None
        if act is not None:
            self._run(act)
            while self._handle_next():
                pass
            self.left = self._next()
        self.call()
        if not self.rests:
            self.bell.put(None)

    def send(self, queue: str, event: Ready | Released) -> None:
        """Hand an event to another queue, with the tensor that it may read now."""
        target = self._queues[queue]
        if type(event) is Ready:
            self.work.hand_on(event.register, event.version, target.work)
        self._tell(target, event)

    def end_step(self, step: int) -> None:
        """All actors of this queue have acted for a step."""
        self._on_end(step)

    def _go_on(self, act: Act | None) -> None:
        mailbox = self.mailbox
        while act is not None:
            if self.told:
                self.call()
            self._run(act)
            # Messages that arrived meanwhile count when the next actor is chosen.
            while not mailbox.empty():
                self._handle(mailbox.get())
            act = self._next()

    def _next(self) -> Act | None:
        if self._gate is not None:
            act = self.machine.upcoming
            if act is None or not self._gate.opens(self.name, act.actor, act.micro):
                return None
        return self.driver.next()

    def _run(self, act: Act) -> None:
        self.driver.run(act)
        if self._gate is None:
            return
        for name in self._gate.end(act.actor, act.micro):
            self._tell(self._queues[name], GateOpened())

    def _tell(self, queue: Queue, message: Event | Control) -> None:
        queue.mailbox.put(message)
        if queue.name != COMPUTE:
            self.told.append(queue)

    def _handle_next(self) -> bool:
        """Handle a message in place of the thread of this queue; False if there is none."""
        if self.mailbox.empty():
            return False
        message = self.mailbox.get()
        if isinstance(message, Stop):  # it ends the other thread, not this one
            self.mailbox.put(message)
            return False
        self._handle(message)
        return True

    def _handle(self, message: Event | Control) -> None:
        if isinstance(message, (Ended, Stop)):
            self._on_control(message)
        elif not isinstance(message, GateOpened):
            self.driver.receive(message)


@final
class Gate:
    """The acts of a rank's step that have ended, and the queues whose next act waits for more of them.

    Args:
        turns: all acts that take memory; the others wait for nothing.
    """

    def __init__(self, turns: Iterable[IssueSlot]) -> None:
        self._turns = {(turn.actor, turn.micro): turn for turn in turns}
        self._lock = Lock()
        # By place among the ends of a step; the first `_count` have all been.
        self._ended = [False] * (len(self._turns) + 1)
        self._count = 0
        # The queues that wait, and for how many ends.
        self._waiting: dict[str, int] = {}

    @property
    def needed(self) -> bool:
        """True if some act waits."""
        return any(turn.waits for turn in self._turns.values())

    def begin(self) -> None:
        """A step begins; the last one has ended."""
        self._ended = [False] * len(self._ended)
        self._count = 0

    def opens(self, queue: str, actor: int, micro: int) -> bool:
        """True if an act may begin now; else its queue is among those that `end` returns one day."""
        turn = self._turns.get((actor, micro))
        if turn is None or not turn.waits:
            return True
        with self._lock:
            if turn.waits <= self._count:
                return True
            self._waiting[queue] = turn.waits
            return False

    def end(self, actor: int, micro: int) -> tuple[str, ...]:
        """An act has ended, and given back what it read; returns the queues that need not wait any more."""
        turn = self._turns.get((actor, micro))
        if turn is None:
            return ()
        with self._lock:
            self._ended[turn.place] = True
            while self._ended[self._count]:
                self._count += 1
            if not self._waiting:
                return ()
            free = tuple(queue for queue, count in self._waiting.items() if count <= self._count)
            for queue in free:
                del self._waiting[queue]
            return free
