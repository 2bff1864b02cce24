"""The processes of a node, each of which leads a group of its own: started, watched, asked, renumbered and ended.

The end of each process is seen when it happens, so that the first is known. This module needs no torch.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any, TypeAlias, final

from weft.runtime.world.in_place.line import FAILED, LINE, RankLine

# Seconds between asking the ranks to end (SIGTERM) and ending them (SIGKILL).
SHUTDOWN_SECONDS = 5.0
# Seconds that ranks have to answer the signal that asks them at which place they are.
ANSWER_SECONDS = 0.2


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
class Interrupted:
    """A signal has told this process to end."""


@final
@dataclass(frozen=True)
class Said:
    """A word that a rank has said over its line.

    Attributes:
        pid: of its process.
        word, text: that it said.
        rank: the global rank, when it was heard.
    """

    pid: int
    word: str
    text: str
    rank: int = 0


# Of the processes of a node, and of its job.
Happening: TypeAlias = Exit | Elsewhere | Interrupted | Said


@final
@dataclass
class Processes:
    """The processes that run, and what is seen of them.

    Attributes:
        command: program and arguments of each.
        happenings: the ends of processes, their words, the failures of other nodes and signals, as they come.
        tell: called with each end.
        lines: to the processes, by rank; none where they get no lines.
        started: all processes, by rank; each leads a group of its own.
        running: ranks of those whose end was not seen.
        said: the last word that each has said, by rank; "" where it has said none.
        notes: of ranks that said that they failed because of others, their texts.
        exits: those that have ended, in the order of time.
        states: how each process was found when it was told to end, by rank.
    """

    command: Sequence[str]
    environment: Mapping[str, str]
    happenings: SimpleQueue[Happening]
    tell: Callable[[Exit], object]
    has_lines: bool = False
    lines: dict[int, RankLine] = field(default_factory=dict)
    started: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    running: set[int] = field(default_factory=set)
    said: dict[int, str] = field(default_factory=dict)
    notes: dict[int, str] = field(default_factory=dict)
    exits: list[Exit] = field(default_factory=list)
    states: dict[int, str] = field(default_factory=dict)

    def start(self, rank: int, variables: Mapping[str, str]) -> None:
        """Start the process of a rank, in a session of its own, and a thread that waits for its end.

        Args:
            rank: the global one.
            variables: of this process, beside those of all.
        """
        environment = {**self.environment, **variables}
        if not self.has_lines:
            process = self._popen(environment)
        else:
            own, theirs = socket.socketpair()
            with theirs:
                environment[LINE] = str(theirs.fileno())
                process = self._popen(environment, (theirs.fileno(),))
            self.lines[rank] = RankLine(own)
            hears = self._hears(process.pid)
            _thread(f"weft rank {rank} line", self.lines[rank].hear, hears)
        self.started[rank] = process
        self.running.add(rank)
        self.said[rank] = ""
        _thread(f"weft rank {rank} end", self._see, process, self.lines.get(rank))

    def _popen(
        self, environment: Mapping[str, str], descriptors: Sequence[int] = ()
    ) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            self.command, env=dict(environment), start_new_session=True, pass_fds=descriptors
        )

    def _see(self, process: subprocess.Popen[bytes], line: RankLine | None) -> None:
        try:
            code = _seen_end(process)
        except ChildProcessError:  # it was dropped
            return
        seen = time.monotonic_ns()
        if line is not None:  # a process has said nothing after its end
            line.take(self._hears(process.pid))
        self.happenings.put(Exit(0, process.pid, code, seen))

    def _hears(self, pid: int) -> Callable[[str, str], object]:
        return lambda word, text: self.happenings.put(Said(pid, word, text))

    def next(self, seconds: float | None) -> Happening | None:
        """The next happening; None where there is nothing within so many seconds."""
        end = None if seconds is None else time.monotonic() + seconds
        while True:
            left = None if end is None else max(0.0, end - time.monotonic())
            try:
                found = self.happenings.get(timeout=left)
            except Empty:
                return None
            if not isinstance(found, Exit | Said):
                return found
            rank = next((r for r, each in self.started.items() if each.pid == found.pid), None)
            if rank is not None and rank in self.running:
                return self._noted(replace(found, rank=rank))

    def _noted(self, found: Exit | Said) -> Exit | Said:
        if isinstance(found, Said):
            self.said[found.rank] = found.word
            if found.word == FAILED:
                self.notes[found.rank] = found.text
            return found
        self.running.remove(found.rank)
        if found.rank in self.states:
            found = replace(found, asked=True, state=self.states[found.rank])
        self.exits.append(found)
        self.tell(found)
        return found

    def settle(self, seconds: float, hurried: bool = False) -> None:
        """Take happenings until all processes have ended, for so many seconds at most.

        Args:
            seconds: at most.
            hurried: True ends it when `Interrupted` happens.
        """
        end = time.monotonic() + seconds
        while self.running and (left := end - time.monotonic()) > 0:
            if isinstance(self.next(left), Interrupted) and hurried:
                return

    def first(self, hears: bool = False) -> Happening | None:
        """Take happenings until one ends the processes, and give that one; None where all of them end well.

        Args:
            hears: True gives the word of a rank that failed because of another one, too.
        """
        while self.running:
            found = self.next(None)
            if isinstance(found, Said):
                if hears and found.word == FAILED:
                    return found
            elif not isinstance(found, Exit) or found.code:
                return found
        return None

    def say(self, word: str, text: str = "") -> None:
        """Say something to all processes that run."""
        for rank in self.running & self.lines.keys():
            self.lines[rank].say(word, text)

    def ask(self, number: int, ranks: Collection[int] | None = None) -> None:
        """Send a signal to those processes that run and have a handler for it, and let them answer.

        Args:
            ranks: that are asked; None for all.
        """
        asked = [self.started[r].pid for r in self.running if ranks is None or r in ranks]
        asked = [pid for pid in asked if not _state(pid) and catches(pid, number)]
        for pid in asked:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        if asked:
            self.settle(ANSWER_SECONDS)

    def kill(self, ranks: Collection[int]) -> None:
        """Kill processes that run, with those that they have started, and see their ends."""
        for rank in ranks:
            self.states[rank] = _state(self.started[rank].pid)
            _send(self.started[rank].pid, signal.SIGKILL)
        end = time.monotonic() + SHUTDOWN_SECONDS
        while self.running & set(ranks) and (left := end - time.monotonic()) > 0:
            self.next(left)

    def drop(self, rank: int) -> None:
        """Forget a process, which is killed where it runs, with those that it has started."""
        process = self.started.pop(rank)
        self.running.discard(rank)
        _send(process.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(SHUTDOWN_SECONDS)
        self.lines.pop(rank).close()
        for each in (self.said, self.notes, self.states):
            each.pop(rank, None)

    def renumber(self, numbers: Mapping[int, int]) -> None:
        """Give the processes, all of which run, new ranks.

        Args:
            numbers: by old rank.
        """
        self.started = {numbers[rank]: each for rank, each in self.started.items()}
        self.lines = {numbers[rank]: each for rank, each in self.lines.items()}
        self.said = {numbers[rank]: each for rank, each in self.said.items()}
        self.running = set(self.started)

    def forget(self) -> None:
        """Forget the ends that were seen, and what was noted, as the job goes on after them."""
        self.exits, self.states, self.notes = [], {}, {}

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
            # One that is stopped hears of nothing until it goes on.
            _send(pid, signal.SIGCONT)
        self.settle(SHUTDOWN_SECONDS if seconds is None else seconds, hurried=seconds is not None)
        for process in self.started.values():
            _send(process.pid, signal.SIGKILL)
        self.settle(SHUTDOWN_SECONDS)

    def collect(self) -> None:
        """Let the system forget the processes whose end was seen; until then their numbers stand for no others."""
        for rank in self.started.keys() - self.running:
            self.started[rank].wait()
        for line in self.lines.values():
            line.close()


def _thread(name: str, work: Callable[..., None], *arguments: Any) -> None:
    threading.Thread(target=work, args=arguments, name=name, daemon=True).start()


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


def catches(pid: int, number: int) -> bool:
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
