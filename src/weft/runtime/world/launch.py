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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, final

from weft.runtime.world.interrupts import Interrupts

# Seconds that other ranks have to end by themselves when one has failed: those that do not are the ones
# that do not answer.
GRACE_SECONDS = 1.0
# Seconds between asking the ranks to end (SIGTERM) and ending them (SIGKILL).
SHUTDOWN_SECONDS = 5.0
# Seconds that ranks have to answer the signal that asks them at which place they are.
ANSWER_SECONDS = 0.2


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
        nanoseconds: when it was seen, as `time.monotonic_ns` tells.
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
class _Interrupted:
    """A signal has told this process to end."""


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
        events: the ends of processes, the failures of other nodes and signals, as they come.
        tell: called with each end.
        started: all processes, by rank; each leads a group of its own.
        running: ranks of those whose end was not seen.
        exits: those that have ended, in the order of time.
        states: how each process was found when it was told to end, by rank.
    """

    events: SimpleQueue[Exit | Elsewhere | _Interrupted]
    tell: Callable[[Exit], object]
    started: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    exits: list[Exit] = field(default_factory=list)
    states: dict[int, str] = field(default_factory=dict)

    def start(self, command: Sequence[str], rank: int, environment: Mapping[str, str]) -> None:
        """Start the process of a rank, in a session of its own, and a thread that waits for its end."""
        process = subprocess.Popen(command, env=dict(environment), start_new_session=True)
        self.started[rank] = process
        self.running.add(rank)
        name = f"weft rank {rank} end"
        threading.Thread(target=self._see, args=(rank, process), name=name, daemon=True).start()

    def _see(self, rank: int, process: subprocess.Popen[bytes]) -> None:
        code = _seen_end(process)
        self.events.put(Exit(rank, process.pid, code, time.monotonic_ns()))

    def next(self, seconds: float | None) -> Exit | Elsewhere | _Interrupted | None:
        """The next event; None where there is none within so many seconds."""
        try:
            event = self.events.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(event, Exit):
            self.running.remove(event.rank)
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

    def first(self) -> Exit | Elsewhere | _Interrupted | None:
        """Take events until one ends the processes, and give that one; None where all of them end well."""
        while self.running:
            event = self.next(None)
            if not isinstance(event, Exit) or event.code:
                return event
        return None

    def ask(self, number: int) -> None:
        """Send a signal to those processes that run and have a handler for it, and let them answer."""
        asked = [self.started[rank].pid for rank in self.running]
        asked = [pid for pid in asked if not _state(pid) and _catches(pid, number)]
        for pid in asked:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if asked:
            self.settle(ANSWER_SECONDS)

    def end(self) -> None:
        """End all processes, with those that they have started: asked first, killed after `SHUTDOWN_SECONDS`.

        Asked are the ranks alone: one that ends in good order may need those that it has started, as the processes that
        load its samples.
        """
        for rank in self.running:
            pid = self.started[rank].pid
            self.states[rank] = _state(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
            # One that is stopped hears of nothing until it goes on.
            _send(pid, signal.SIGCONT)
        self.settle(SHUTDOWN_SECONDS)
        for process in self.started.values():
            _send(process.pid, signal.SIGKILL)
        self.settle(SHUTDOWN_SECONDS)

    def collect(self) -> None:
        """Let the system forget the processes whose end was seen; until then their numbers stand for no others."""
        for rank in self.started.keys() - self.running:
            self.started[rank].wait()


def launch(
    command: Sequence[str],
    fleet: Fleet,
    environment: Mapping[str, str],
    events: SimpleQueue[Any] | None = None,
    tell: Callable[[Exit], object] = lambda _: None,
    interrupts: Interrupts | None = None,
    asks: int | None = None,
) -> Ending:
    """Run `command` once for each rank of this node and wait for all of them.

    Each process shares the cores fairly with the others unless OMP_NUM_THREADS says otherwise.

    Args:
        command: program and arguments.
        fleet: how many, and which ranks.
        environment: variables of all processes, without those of `Fleet.environment`.
        events: where failures of other nodes come as `Elsewhere`.
        tell: called with each end.
        interrupts: signals that tell this process to end. One that comes when a process has failed changes nothing.
        asks: a signal for processes that still run a while after another one has failed, before they are told to end.

    Returns:
        how all of them ended.

    Raises:
        KeyboardInterrupt: when this process was told to end; the ranks have ended then.
    """
    queue: SimpleQueue[Any] = SimpleQueue() if events is None else events
    found = _Fleet(queue, tell)
    with (interrupts or Interrupts()).told_to(lambda: queue.put(_Interrupted())):
        try:
            for local in range(fleet.ranks):
                own = {**environment, **_threads(fleet.ranks), **fleet.environment(local)}
                found.start(command, fleet.first + local, own)
            first = found.first()
            if isinstance(first, Exit):
                found.settle(GRACE_SECONDS)
            if asks is not None and not isinstance(first, _Interrupted):
                found.ask(asks)
        finally:
            if found.running or any(each.code for each in found.exits):
                found.end()
            found.collect()
    if isinstance(first, _Interrupted):
        raise KeyboardInterrupt
    return Ending(tuple(found.exits), first if isinstance(first, Elsewhere) else None)


def _threads(ranks: int) -> dict[str, str]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    share = str(max(1, (cores or 1) // ranks))
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", share)}


def _seen_end(process: subprocess.Popen[bytes]) -> int:
    """Wait for the end of a process and give its exit code, as `Popen.wait` does.

    Where the system can, its number stays taken: its group, of which others may be left, is to be ended by that.
    """
    if not hasattr(os, "waitid"):
        return process.wait()
    found = os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert found is not None
    return found.si_status if found.si_code == os.CLD_EXITED else -found.si_status


def _send(group: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _catches(pid: int, number: int) -> bool:
    """True where a process has a handler for a signal; False where the system does not tell."""
    if sys.platform != "linux":
        return False
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


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
