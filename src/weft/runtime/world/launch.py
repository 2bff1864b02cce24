"""Start one process for each rank of this node, watch them, and end them all when one fails.

No port is opened for this: ranks of one node meet in a file (`weft.runtime.world.rendezvous`). The end of
each process is seen when it happens, so that the first is known. This module needs no torch.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, TypeAlias, final

from weft.errors import UserError, wrong

# Seconds that other ranks have to end by themselves when one has failed: those that do not are the ones
# that do not answer.
SETTLE_SECONDS = 1.0
# Seconds between asking the ranks to end (SIGTERM) and ending them (SIGKILL).
SHUTDOWN_SECONDS = 5.0
# Seconds that ranks have to answer the signal that asks them at which place they are.
ANSWER_SECONDS = 0.2


@final
@dataclass(frozen=True)
class NodeProcesses:
    """The processes of this node, among all of the job."""

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
        code: the exit code; negative: minus the signal.
        nanoseconds: when it was seen, as `time.monotonic_ns` tells.
        asked: true if the launcher had told it to end.
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
class RemoteFailure:
    """The failure of another node, in words."""

    text: str


@final
@dataclass(frozen=True)
class Interrupted:
    """A signal has told this process to end."""


# For the processes of a node, and of its job.
Happening: TypeAlias = Exit | RemoteFailure | Interrupted


@final
@dataclass(frozen=True)
class LaunchResult:
    """The end of the processes of a node."""

    exits: tuple[Exit, ...]
    elsewhere: RemoteFailure | None = None

    @property
    def failed(self) -> bool:
        """True if a process, or another node, has failed."""
        return self.elsewhere is not None or any(each.code for each in self.exits)


def launch(
    command: Sequence[str],
    fleet: NodeProcesses,
    environment: Mapping[str, str],
    events: SimpleQueue[Any] | None = None,
    tell: Callable[[Exit], object] = lambda _: None,
    interrupts: Interrupts | None = None,
    asks: int | None = None,
    grace: float = SHUTDOWN_SECONDS,
) -> LaunchResult:
    """Run `command` once for each rank of this node and wait for all of them.

    Each process shares the cores fairly with the others unless OMP_NUM_THREADS says otherwise.

    Args:
        environment: variables of all processes, without those of `NodeProcesses.environment`.
        events: where failures of other nodes come as `RemoteFailure`.
        asks: a signal for processes that still run a while after another one has failed, before they are told to end.
        grace: seconds that processes have to end when this process was told to end.

    Raises:
        KeyboardInterrupt: when this process was told to end; the ranks have ended then.
    """
    queue: SimpleQueue[Any] = SimpleQueue() if events is None else events
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    threads = os.environ.get("OMP_NUM_THREADS", str(max(1, (cores or 1) // fleet.ranks)))
    found = _Processes(command, {**environment, "OMP_NUM_THREADS": threads}, queue, tell)
    first: Happening | None = None

    def interrupted() -> None:
        queue.put(Interrupted())

    with (interrupts or Interrupts()).told_to(interrupted, interrupted):
        try:
            for local in range(fleet.ranks):
                found.start(fleet.first + local, fleet.environment(local))
            first = found.first()
            if isinstance(first, Exit):
                found.settle(SETTLE_SECONDS)
            if asks is not None and not isinstance(first, Interrupted):
                found.ask(asks)
        finally:
            if found.running or any(each.code for each in found.exits):
                found.end(grace if isinstance(first, Interrupted) else None)
            found.collect()
    if isinstance(first, Interrupted):
        raise KeyboardInterrupt
    return LaunchResult(tuple(found.exits), first if isinstance(first, RemoteFailure) else None)


@final
@dataclass(slots=True)
class _Processes:
    command: Sequence[str]
    environment: Mapping[str, str]
    happenings: SimpleQueue[Happening]
    tell: Callable[[Exit], object]
    started: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    exits: list[Exit] = field(default_factory=list)
    states: dict[int, str] = field(default_factory=dict)

    def start(self, rank: int, variables: Mapping[str, str]) -> None:
        """Start the process of a rank, in a session of its own, and a thread that waits for its end."""
        environment = {**self.environment, **variables}
        process = subprocess.Popen(self.command, env=environment, start_new_session=True)
        self.started[rank] = process
        self.running.add(rank)

        def see() -> None:
            code = _seen_end(process)
            self.happenings.put(Exit(rank, process.pid, code, time.monotonic_ns()))

        threading.Thread(target=see, name=f"weft rank {rank} end", daemon=True).start()

    def next(self, seconds: float | None) -> Happening | None:
        """The next happening; None if there is nothing within so many seconds."""
        try:
            found = self.happenings.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(found, Exit):
            self.running.remove(found.rank)
            if found.rank in self.states:
                found = replace(found, asked=True, state=self.states[found.rank])
            self.exits.append(found)
            self.tell(found)
        return found

    def first(self) -> Happening | None:
        """Take happenings until one ends the processes, and give that one; None if all of them end well."""
        while self.running:
            found = self.next(None)
            if not isinstance(found, Exit) or found.code:
                return found
        return None

    def settle(self, seconds: float, hurried: bool = False) -> None:
        """Take happenings until all processes have ended, for so many seconds at most.

        Args:
            hurried: True ends it when `Interrupted` happens.
        """
        end = time.monotonic() + seconds
        while self.running and (left := end - time.monotonic()) > 0:
            if isinstance(self.next(left), Interrupted) and hurried:
                return

    def ask(self, number: int) -> None:
        """Send a signal to those processes that run and have a handler for it, and let them answer."""
        running = [self.started[rank].pid for rank in self.running]
        asked = [pid for pid in running if not _state(pid) and catches(pid, number)]
        for pid in asked:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if asked:
            self.settle(ANSWER_SECONDS)

    def end(self, seconds: float | None = None) -> None:
        """End all processes, with those that they have started: asked first, killed later.

        Asked are the ranks alone: one that ends in good order may need those that it has started, as the processes that
        load its samples.

        Args:
            seconds: that they have to end after they were asked, or until `Interrupted` happens; None for
                `SHUTDOWN_SECONDS`, which nothing cuts short.
        """
        for rank in self.running:
            pid = self.started[rank].pid
            self.states[rank] = _state(pid)
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)
            # One that is stopped hears of nothing until it continues.
            _send(pid, signal.SIGCONT)
        self.settle(SHUTDOWN_SECONDS if seconds is None else seconds, hurried=seconds is not None)
        for process in self.started.values():
            _send(process.pid, signal.SIGKILL)
        self.settle(SHUTDOWN_SECONDS)

    def collect(self) -> None:
        """Let the system forget the processes whose end was seen; until then their numbers stand for no others."""
        for rank in self.started.keys() - self.running:
            self.started[rank].wait()


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


def _state(pid: int) -> str:
    if sys.platform != "linux":
        return ""
    try:
        with open(f"/proc/{pid}/stat") as file:
            letter = file.read().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""
    return letter if letter == "T" else ""


# By which schedulers tell jobs to end that ask for it, as by Slurm's --signal.
_OF_SCHEDULERS = ("SIGUSR1", "SIGUSR2")
_SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", *_OF_SCHEDULERS)


def ending_signals() -> list[signal.Signals]:
    """SIGINT and SIGTERM, and of SIGUSR1 and SIGUSR2 those that this process has no handler for and would die of."""
    others = [getattr(signal, name) for name in _OF_SCHEDULERS if hasattr(signal, name)]
    default = (n for n in others if signal.getsignal(n) is signal.SIG_DFL)
    # faulthandler.register tells Python's own table nothing.
    return [signal.SIGINT, signal.SIGTERM, *(n for n in default if not catches(os.getpid(), n))]


def catches(pid: int, number: int) -> bool:
    """True if a process has a handler for a signal; False if the system does not tell."""
    if sys.platform != "linux":
        return False
    try:
        with open(f"/proc/{pid}/status") as file:
            caught = next(line for line in file if line.startswith("SigCgt:"))
    except (OSError, StopIteration):
        return False
    return bool(int(caught.split()[1], 16) >> (number - 1) & 1)


def _nothing() -> None: ...


@final
class Interrupts:
    """Takes the signals that tell this process to end, as long as it is entered.

    The first one counts, and those after it disturb nothing, but for Ctrl-C where someone wants to hear of it. Signals
    that were ignored, as SIGHUP is under nohup, stay so. Outside the main thread none is heard.
    """

    def __init__(self) -> None:
        self.heard = False
        self._tell: Callable[[], object] = _nothing
        self._hurry: Callable[[], object] = _nothing
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            numbers = [getattr(signal, name) for name in _SIGNALS if hasattr(signal, name)]
            found = {number: signal.getsignal(number) for number in numbers}
            # None: of no handler of Python's.
            self._before = {n: by for n, by in found.items() if by not in (signal.SIG_IGN, None)}
            for number in self._before:
                signal.signal(number, self._hear)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextmanager
    def told_to(
        self, tell: Callable[[], object], hurry: Callable[[], object] = _nothing
    ) -> Iterator[None]:
        """Call `tell` as soon as one comes while the body runs, and at its beginning where one has come before."""
        before = self._tell, self._hurry
        self._tell, self._hurry = tell, hurry
        try:
            if self.heard:
                tell()
            yield
        finally:
            self._tell, self._hurry = before

    @contextmanager
    def raised(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in the body."""
        with self.told_to(_interrupt):
            yield

    def _hear(self, number: int, _frame: FrameType | None) -> None:
        if not self.heard:
            self.heard = True
            self._tell()
        elif number == signal.SIGINT:
            self._hurry()


def _interrupt() -> None:
    raise KeyboardInterrupt


# Names of the variables by which `weft run` tells its ranks how to meet, and what they say.
#
# No other user of the host can read the environment of a rank. This module needs no torch.


# Holds the process id of the launcher.
LAUNCHER = "WEFT_LAUNCHER"
# Path of the file in which the ranks of one host meet.
MEETING = "WEFT_MEETING"
# "host:port" of the store in which the ranks of several hosts meet.
STORE = "WEFT_STORE"
# The secret of a run on several nodes, which users set: who knows it belongs to the job.
SECRET = "WEFT_SECRET"
# Seconds that a rank waits for another one.
TIMEOUT = "WEFT_TIMEOUT"

# How many times the ranks of this run were started before.
RESTART = "WEFT_RESTART"

# Without the variable.
TIMEOUT_SECONDS = 300.0
# Characters that a secret has at least.
_SHORTEST = 16


def given_secret() -> bytes:
    """The secret of the run; empty if there is none, as when torchrun started this process without one.

    Raises:
        UserError: it is too short to be one.
    """
    text = os.environ.get(SECRET, "")
    if text and len(text) < _SHORTEST:
        raise UserError(
            f"{SECRET} has {len(text)} characters; give it {_SHORTEST} or more that nobody can guess, the same on all "
            "nodes, such as `openssl rand -hex 32` prints"
        )
    return text.encode()


def started() -> int:
    """The number of times that the ranks of this run were started before."""
    return int(os.environ.get(RESTART) or 0)


def timeout_seconds() -> float:
    """Seconds that a rank waits for another one: `WEFT_TIMEOUT`, which `weft run --timeout` sets.

    Raises:
        UserError: it is not a number above 0.
    """
    text = os.environ.get(TIMEOUT, "")
    try:
        found = float(text or TIMEOUT_SECONDS)
    except ValueError:
        found = 0.0
    if not (found > 0 and math.isfinite(found)):
        raise wrong(TIMEOUT, "a number of seconds above 0", text)
    return found
