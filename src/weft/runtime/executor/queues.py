"""One queue at run time: its state machine, its mailbox, and the work of its actors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue
from threading import Lock
from time import perf_counter_ns
from typing import NamedTuple, TypeAlias

from torch import Tensor

from weft.actors import Act, Action, EndStep, Event, Free, QueueMachine, Ready, Send
from weft.ir.plan import COMPUTE
from weft.runtime.executor.trace import Span
from weft.runtime.executor.work import Work


class Ended(NamedTuple):
    """To the compute queue: `queue` has done all its work of a step."""

    queue: str
    step: int


class Stop(NamedTuple):
    """To a queue: start no further act; the rank has failed or closes."""


Control: TypeAlias = "Ended | Stop"
Mailbox: TypeAlias = "SimpleQueue[Event | Control]"


class ActError(Exception):
    """An actor raised; `__cause__` is what it raised."""

    def __init__(self, act: Act) -> None:
        super().__init__(f"{act} raised")
        self.act = act


class Queue:
    """Runs the actors of one queue, on the one thread that calls `receive`, or `serve`.

    A queue with a thread of its own is woken by its bell, and only when it has an act to run: the
    sender handles the messages (`prepare`), and may run the act itself (`act_here`).

    Args:
        machine: decides when the actors act.
        works: what they do, by actor id.
        queues: all queues of the rank by name; this one adds itself.
        on_end: called with a step when all actors of this queue have acted for it.
        on_control: called with what arrives and is no event.
    """

    def __init__(
        self,
        machine: QueueMachine,
        works: Mapping[int, Work],
        queues: dict[str, Queue],
        on_end: Callable[[int], None],
        on_control: Callable[[Control], None],
    ) -> None:
        self.name = machine.queue
        self.machine = machine
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
        # What actors of this queue have yet to read, by register and version; dropped after the
        # last of them. The producer's queue puts a tensor here before it sends `Ready`.
        self.tensors: dict[tuple[str, int], Tensor] = {}
        # When each act of the last step ran (`weft.runtime.executor.trace`).
        self.spans: list[Span] = []
        self._works = works
        self._queues = queues
        self._on_end = on_end
        self._on_control = on_control
        queues[self.name] = self

    def receive(self, message: Event | Control) -> None:
        """Handle a message and run all acts that follow from it.

        Raises:
            ActError: when an actor raises.
        """
        self._go_on(self._handle(message))

    def serve(self) -> None:
        """Wait for the bell, then run what was left and handle all messages.

        Raises:
            ActError: when an actor raises.
        """
        self.bell.get()
        with self.lock:
            act, self.left = self.left, None
            self._go_on(act)
            while not self.mailbox.empty():
                self._go_on(self._handle(self.mailbox.get()))
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
        """Handle messages on a thread of another queue, up to one that starts an act.

        Returns:
            Whether the thread of this queue has something to do.
        """
        if not self.lock.acquire(blocking=False):
            return True
        try:
            self._catch_up()
            return not self.rests
        finally:
            self.lock.release()

    @property
    def rests(self) -> bool:
        """Whether there is nothing to handle and nothing to run; asked by who holds the lock."""
        return self.left is None and self.mailbox.empty()

    def act_here(self) -> None:
        """Run the act that is left, on a thread of another queue that holds the lock.

        Raises:
            ActError: when the actor raises.
        """
        act, self.left = self.left, None
        if act is not None:
            self._run(act)
            self._catch_up()
            self.left = self._follow(self.machine.finish())
        self.call()
        if not self.rests:
            self.bell.put(None)

    def _catch_up(self) -> None:
        """Handle messages up to one that starts an act, in place of the thread of this queue."""
        while self.left is None and not self.mailbox.empty():
            message = self.mailbox.get()
            if isinstance(message, Stop):  # it ends the other thread, not this one
                self.mailbox.put(message)
                break
            self.left = self._handle(message)
        self.call()

    def _go_on(self, act: Act | None) -> None:
        """Run an act that was started, and all that follow from it."""
        finish, mailbox = self.machine.finish, self.mailbox
        while act is not None:
            if self.told:
                self.call()
            self._run(act)
            # What arrived meanwhile counts when the next actor is chosen; no other starts while
            # this one is not finished.
            while not mailbox.empty():
                self._handle(mailbox.get())
            act = self._follow(finish())

    def _handle(self, message: Event | Control) -> Act | None:
        if isinstance(message, (Ended, Stop)):
            self._on_control(message)
            return None
        return self._follow(self.machine.handle(message))

    def _follow(self, actions: Sequence[Action]) -> Act | None:
        """Do what the machine says; the act that it starts is left to the caller."""
        act = None
        for action in actions:
            if type(action) is Act:
                act = action
            else:
                self._obey(action)
        return act

    def _obey(self, action: Action) -> None:
        if type(action) is Send:
            event = action.event
            target = self._queues[action.queue]
            key = (event.register, event.version)
            # Variables are written in place: their `Ready` brings no tensor.
            if type(event) is Ready and key in self.tensors:
                target.tensors[key] = self.tensors[key]
            target.mailbox.put(event)
            if target.name != COMPUTE:
                self.told.append(target)
        elif type(action) is Free:
            self.tensors.pop((action.register, action.version), None)
        elif type(action) is EndStep:
            self._on_end(action.step)

    def _inputs(self, work: Work, act: Act, version: int) -> list[Tensor]:
        """What an act reads; what it is the last of this queue to read, nobody else holds then."""
        tensors = self.tensors
        if work.alone:
            return [tensors.pop((name, version)) for name in work.reads]
        inputs = []
        for name in work.reads:
            once = name in work.once
            key = (name, act.step if once else version)
            again = once and act.micro + 1 < work.acts
            last = not again and self.machine.readers_left(*key) == 1
            inputs.append(tensors.pop(key) if last else tensors[key])
        return inputs

    def _run(self, act: Act) -> None:
        work = self._works[act.actor]
        _, step, micro = act
        version = step * work.acts + micro
        begun = perf_counter_ns()
        try:
            outputs = work.act(step, micro, self._inputs(work, act, version))
        except BaseException as error:
            raise ActError(act) from error
        self.spans.append((act, begun, perf_counter_ns()))
        for name, tensor in zip(work.writes, outputs, strict=True):
            if name not in work.once:
                self.tensors[name, version] = tensor
            elif micro + 1 == work.acts:
                self.tensors[name, step] = tensor
