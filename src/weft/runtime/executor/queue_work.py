"""The executor of a queue whose acts are done where they are started: its works, and the tensors that they pass on."""

from __future__ import annotations

from collections.abc import Mapping
from time import perf_counter_ns
from typing import final

from torch import Tensor

from weft.actors import Act, Clock, QueueMachine
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

    Args:
        machine: of the queue; knows who has yet to read a version.
        works: what actors do, by id.
        clock: nanoseconds.

    Attributes:
        tensors: what actors of this queue have yet to read, by register and version; dropped after
            the last of them. Of registers made on another queue, that queue puts them here before
            it sends `Ready`.
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
        """Do an act.

        Raises:
            ActError: when the actor raises.
        """
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
