"""The driver of a queue: what its machine says is done, whatever the clock and whatever does the work.

A queue makes three moves: it receives an event, starts an act, ends it. When it makes them is up to
those that drive it, all of them with the machines of `machine.py`:

driven by            clock      an act ends
simulate.py          virtual    when its estimated seconds are over
runtime/executor/queues.py    real       when its work is done, on the thread of the queue
runtime/executor/launches.py  none       when it is launched: an event of its stream stands for its real end
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar, final

from weft.actors.machine import QueueMachine
from weft.actors.messages import Act, Action, EndStep, Event, Free, Ready, Released, Send

Time = TypeVar("Time", covariant=True)


class Clock(Protocol[Time]):
    """Says what time it is: in virtual seconds (float), or in real nanoseconds (int)."""

    def __call__(self) -> Time: ...


class Executor(Protocol):
    """Does the work of a queue."""

    def start(self, act: Act) -> bool:
        """Start an act. True when it has ended on return; otherwise `Driver.end` is called when it has."""

    def free(self, register: str, version: int) -> None:
        """Drop a version that was made here and that no actor of this queue reads."""


class Post(Protocol):
    """Takes what a queue has to say to others."""

    def send(self, queue: str, event: Ready | Released) -> None:
        """Deliver an event to another queue, after all that was sent there before."""

    def end_step(self, step: int) -> None:
        """All actors of the queue have acted for a step."""


@final
class Driver:
    """Drives one machine.

    Args:
        machine: decides when the actors of the queue act.
        executor: what their acts are.
        post: takes what goes to other queues.
    """

    __slots__ = ("_executor", "_post", "machine")

    def __init__(self, machine: QueueMachine, executor: Executor, post: Post) -> None:
        self.machine = machine
        self._executor = executor
        self._post = post

    def receive(self, event: Event) -> None:
        """Take an event; it starts nothing."""
        self._do(self.machine.handle(event))

    def next(self) -> Act | None:
        """The act that comes next, which the machine takes for started; None if none may start. `run` it."""
        return self.machine.start()

    def run(self, act: Act) -> None:
        """Do an act, or begin to."""
        if self._executor.start(act):
            self._do(self.machine.finish())

    def go_on(self) -> bool:
        """Start the next act; False if none may start."""
        act = self.machine.start()
        if act is not None:
            self.run(act)
        return act is not None

    def end(self) -> None:
        """The act that runs has ended."""
        self._do(self.machine.finish())

    def _do(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if type(action) is Send:
                self._post.send(action.queue, action.event)
            elif type(action) is Free:
                self._executor.free(action.register, action.version)
            elif type(action) is EndStep:
                self._post.end_step(action.step)
