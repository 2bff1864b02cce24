"""Planners as the search sees them: asked ahead, they answer when the search reaches a strategy.

The result of a search does not depend on planners: their answers equal those of the search itself.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from types import TracebackType
from typing import Literal, NamedTuple, TypeAlias, final

from weft.files import PACKAGE
from weft.planning.machine import Machine
from weft.planning.stored_step import StoredStep
from weft.search.measures import Answer, TooSlow
from weft.strategy.strategy import Strategy
from weft.units import Seconds

# Which of the steps of a search: the whole one, or one with few of its blocks.
StepName: TypeAlias = Literal["whole", "few", "more"]


@final
class Setup(NamedTuple):
    """A step to plan for, as `Evaluator` takes it."""

    name: StepName
    step: StoredStep
    machine: Machine
    ranks: tuple[int, ...]
    most_classes: int | None


@final
class PlannerQuestion(NamedTuple):
    """A strategy to plan, and the seconds that a step may take to be simulated whole."""

    name: StepName
    strategy: Strategy
    most: Seconds


@final
class PlannedAhead(NamedTuple):
    """The measures of a strategy that was planned ahead, and the seconds of planning."""

    answer: Answer | TooSlow
    took: float


# Seconds of planning after which processes are worth their start, and nodes of a step whose first plan takes as long.
WORTH, LARGE = 1.0, 3000
_Key: TypeAlias = tuple[StepName, str]


@final
class Planners:
    """A context of planner processes, started when the search has run for a while or its step is large.

    Args:
        count: number of processes; 0 for none.
    """

    def __init__(self, count: int = 0) -> None:
        self._count = count
        self._worked = 0.0
        self._every: list[_Planner] = []
        self._done: dict[_Key, PlannedAhead] = {}
        self._setups: dict[StepName, bytes] = {}

    def __enter__(self) -> Planners:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each in self._every:
            each.end()
        self._every, self._count = [], 0

    def begin(self, nodes: int) -> None:
        """Begin a search of a step with so many nodes; starts the processes where these are many."""
        self._start_if(nodes >= LARGE)

    def worked(self, seconds: float) -> None:
        """Note that the search has planned so long by itself; starts the processes once that is long."""
        self._worked += seconds
        self._start_if(self._worked > WORTH)

    def _start_if(self, worth: bool) -> None:
        if worth and not self._every:
            self._every = [_Planner() for _ in range(self._count)]

    def has_time(self) -> bool:
        """True if one has nothing to do."""
        return any(each.is_idle() for each in self._collected())

    def ask(
        self,
        name: StepName,
        key: str,
        strategy: Strategy,
        most: Seconds,
        setup: Callable[[], Setup],
    ) -> None:
        """Let a free process plan a new strategy; `setup` makes the planner's input."""
        asked = name, key
        every = self._collected()
        if asked in self._done or any(each.question == asked for each in every):
            return
        free = next((each for each in every if each.is_idle()), None)
        if free is not None:
            if name not in self._setups:
                self._setups[name] = _pickled(setup())
            free.ask(asked, self._setups[name], _pickled(PlannerQuestion(name, strategy, most)))

    def taken(self, name: StepName, key: str) -> PlannedAhead | None:
        """The measures of a strategy, once it is planned; None if it was not asked for."""
        asked = name, key
        for each in self._every:
            if each.question == asked:
                self._note(each)
        self._collected()
        return self._done.pop(asked, None)

    def _collected(self) -> list[_Planner]:
        for each in self._every:
            if each.has_answered():
                self._note(each)
        return self._every

    def _note(self, planner: _Planner) -> None:
        asked, found = planner.question, planner.answer()
        if asked is not None and found is not None:
            self._done[asked] = found


@final
class _Planner:
    """One process. If it ends before its time, it has never time again."""

    def __init__(self) -> None:
        self.question: _Key | None = None
        self._knows = set[StepName]()
        self._own, theirs = Pipe()
        self._told: Thread | None = None
        self._process = _started(theirs)

    def is_idle(self) -> bool:
        telling = self._told is not None and self._told.is_alive()
        return self._process.poll() is None and self.question is None and not telling

    def has_answered(self) -> bool:
        return self.question is not None and self._own.poll()

    def ask(self, asked: _Key, setup: bytes, question: bytes) -> None:
        self.question, (name, _) = asked, asked
        messages = [question] if name in self._knows else [setup, question]
        self._knows.add(name)
        # By a thread: it may take a second until a process that starts reads a large step.
        self._told = Thread(target=self._tell, args=(messages,), daemon=True)
        self._told.start()

    def _tell(self, messages: Sequence[bytes]) -> None:
        try:
            for each in messages:
                self._own.send_bytes(each)
        except OSError:  # the process has ended; `answer` finds that
            return

    def answer(self) -> PlannedAhead | None:
        """Waits for it; None if the process has ended."""
        self.question = None
        try:
            found = self._own.recv()
        except (EOFError, OSError):  # it has ended: the search makes the answer by itself
            self.end()
            return None
        assert isinstance(found, PlannedAhead)
        return found

    def end(self) -> None:
        self._process.kill()
        self._process.wait()
        self._own.close()


# A planner: it plans what it is asked for until the search closes its end of the socket.
_PLANNER = """
import sys
from multiprocessing.connection import Connection
from weft.search.evaluator import serve
serve(Connection(int(sys.argv[1])))
"""


def _pickled(message: Setup | PlannerQuestion) -> bytes:
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def _started(theirs: Connection) -> subprocess.Popen[bytes]:
    """The process at the other end; not of this one's group, so that Ctrl-C is the search's alone."""
    paths = os.pathsep.join(filter(None, (os.path.dirname(PACKAGE), os.environ.get("PYTHONPATH"))))
    with theirs:
        return subprocess.Popen(
            [sys.executable, "-c", _PLANNER, str(theirs.fileno())],
            env={**os.environ, "PYTHONPATH": paths},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
