"""Start one process for each rank of this node, watch them, and end them all when one fails.

Nothing listens anywhere for this: ranks of one node meet in a file (`weft.runtime.world.meeting`). The end of
each process is seen when it happens, so that the first is known. This module needs no torch.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, final

# Seconds that other ranks have to end by themselves when one has failed: those that do not are the ones
# that do not answer.
GRACE_SECONDS = 1.0
# Seconds between asking the ranks to end (SIGTERM) and ending them (SIGKILL).
SHUTDOWN_SECONDS = 5.0

# What a launcher is told to end with.
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT")


@final
@dataclass(frozen=True)
class Fleet:
    """The processes of this node, among all of the job.

    Attributes:
        ranks: processes on this node.
        first: the rank of the first of them; the others follow.
        world: processes of the job.
        node, nodes: number of this node, from 0, and how many there are.
    """

    ranks: int
    first: int = 0
    world: int = 0
    node: int = 0
    nodes: int = 1

    def environment(self, local: int) -> dict[str, str]:
        """The variables of one process, by its number on this node, under the names that torchrun gives them."""
        values = {
            "RANK": self.first + local,
            "LOCAL_RANK": local,
            "WORLD_SIZE": self.world or self.ranks,
            "LOCAL_WORLD_SIZE": self.ranks,
            "GROUP_RANK": self.node,
            "GROUP_WORLD_SIZE": self.nodes,
        }
        return {name: str(value) for name, value in values.items()}


@final
@dataclass(frozen=True)
class Exit:
    """The end of one process.

    Attributes:
        rank: the global rank.
        pid: of the process.
        code: the exit code; negative: minus the signal.
        nanoseconds: when it was seen, as `time.time_ns` tells.
        asked: true where the launcher had told it to end.
        state: what the process did when it was told to: "T" where it was stopped, else "".
    """

    rank: int
    pid: int
    code: int
    nanoseconds: int = 0
    asked: bool = False
    state: str = ""


@final
@dataclass(frozen=True)
class Elsewhere:
    """The failure of another node, in words."""

    text: str


@final
@dataclass(frozen=True)
class Ending:
    """The end of the processes of a node.

    Attributes:
        exits: of all of them, in the order of time.
        elsewhere: the failure of another node that ended them, where there was one.
    """

    exits: tuple[Exit, ...]
    elsewhere: Elsewhere | None = None

    @property
    def failed(self) -> bool:
        """True where a process, or another node, has failed."""
        return self.elsewhere is not None or any(each.code for each in self.exits)


@final
@dataclass
class _Fleet:
    """The processes that run, and what is seen of them.

    Attributes:
        events: the ends of processes, and the failures of other nodes, as they come.
        tell: called with each end.
        running: by rank.
        exits: those that have ended, in the order of time.
        states: how each process was found when it was told to end, by rank.
        groups: the process groups of all that were started.
    """

    events: SimpleQueue[Exit | Elsewhere]
    tell: Callable[[Exit], object]
    running: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    exits: list[Exit] = field(default_factory=list)
    states: dict[int, str] = field(default_factory=dict)
    groups: list[int] = field(default_factory=list)

    def start(self, command: Sequence[str], rank: int, environment: Mapping[str, str]) -> None:
        """Start the process of a rank, in a session of its own, and a thread that waits for its end."""
        process = subprocess.Popen(command, env=dict(environment), start_new_session=True)
        self.running[rank] = process
        self.groups.append(process.pid)
        name = f"weft rank {rank} end"
        threading.Thread(target=self._see, args=(rank, process), name=name, daemon=True).start()

    def _see(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = process.wait()
        self.events.put(Exit(rank, process.pid, code, time.time_ns()))

    def next(self, seconds: float | None) -> Exit | Elsewhere | None:
        """The next event; None where there is none within so many seconds."""
        try:
            event = self.events.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(event, Exit):
            self.running.pop(event.rank)
            if event.rank in self.states:
                taken = (event.rank, event.pid, event.code, event.nanoseconds)
                event = Exit(*taken, asked=True, state=self.states[event.rank])
            self.exits.append(event)
            self.tell(event)
        return event

    def settle(self, seconds: float) -> None:
        """Take events until all processes have ended, for so many seconds at most."""
        end = time.monotonic() + seconds
        while self.running and (left := end - time.monotonic()) > 0:
            self.next(left)

    def end(self) -> None:
        """End all processes, with those that they have started: asked first, killed after `SHUTDOWN_SECONDS`."""
        for rank, process in self.running.items():
            self.states[rank] = _state(process.pid)
            # One that is stopped hears of nothing until it goes on.
            _send(process.pid, signal.SIGTERM)
            _send(process.pid, signal.SIGCONT)
        self.settle(SHUTDOWN_SECONDS)
        for group in self.groups:
            _send(group, signal.SIGKILL)
        self.settle(SHUTDOWN_SECONDS)


def launch(
    command: Sequence[str],
    fleet: Fleet,
    environment: Mapping[str, str],
    events: SimpleQueue[Any] | None = None,
    tell: Callable[[Exit], object] = lambda _: None,
) -> Ending:
    """Run `command` once for each rank of this node and wait for all of them.

    Each process shares the cores fairly with the others unless OMP_NUM_THREADS says otherwise.

    Args:
        command: program and arguments.
        fleet: how many, and which ranks.
        environment: variables of all processes, without those of `Fleet.environment`.
        events: where failures of other nodes come as `Elsewhere`.
        tell: called with each end.

    Returns:
        how all of them ended.

    Raises:
        KeyboardInterrupt: when this process was told to end; the ranks have ended then.
    """
    found = _Fleet(SimpleQueue() if events is None else events, tell)
    elsewhere = None
    with _interrupted_by_signals():
        try:
            for local in range(fleet.ranks):
                own = {**environment, **_threads(fleet.ranks), **fleet.environment(local)}
                found.start(command, fleet.first + local, own)
            while found.running:
                event = found.next(None)
                if isinstance(event, Elsewhere):
                    elsewhere = event
                if elsewhere or (isinstance(event, Exit) and event.code):
                    found.settle(0 if elsewhere else GRACE_SECONDS)
                    break
        finally:
            if found.running or any(each.code for each in found.exits):
                found.end()
    return Ending(tuple(found.exits), elsewhere)


def _threads(ranks: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = str(max(1, (cores or 1) // ranks))
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share)}


@contextmanager
def _interrupted_by_signals() -> Iterator[None]:
    """Raise KeyboardInterrupt here at the first signal that tells this process to end; none disturbs what follows."""
    heard = False

    def hear(_number: int, _frame: object) -> None:
        nonlocal heard
        if not heard:
            heard = True
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # signals are not its business
        yield
        return
    numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
    before = {number: signal.signal(number, hear) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _send(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _state(pid: int) -> str:
    """The letter T where a process is stopped; "" elsewhere, and where the system does not tell."""
    if sys.platform != "linux":
        return ""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return letter if letter == "T" else ""
