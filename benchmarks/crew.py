"""A crew: the processes of one system, one for each rank, that step when they are told to.

Every system has processes of its own, so that no allocator, thread or failure of one touches
another; between its turns a crew sleeps. The processes are forked from one that has imported
everything and computed nothing.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from itertools import pairwise
from multiprocessing.connection import Connection, wait
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.memory import peak_bytes, peak_resident_bytes, resident_bytes
from benchmarks.systems.system import Job, System

FORK = multiprocessing.get_context("fork")
PR_SET_PDEATHSIG = 1

# Seconds; in less than these it cannot be told what a sleeping process uses.
REST = 0.2

# What a rank does first: it may move to another network; returns variables for its environment.
Enter = Callable[[int], Mapping[str, str]]


class SystemFailure(Exception):
    """A system raised, ended or did not answer in time; says what it said."""


@dataclass(frozen=True)
class Turn:
    """Some steps of one rank, or of a crew (then the slowest rank's time).

    Attributes:
        seconds: of one step.
        losses: of each step.
        steps: seconds of each, of a crew those of the slowest rank.
        idle: the part of one core that the process used since its last turn.
    """

    seconds: float
    losses: tuple[float, ...]
    idle: float
    steps: tuple[float, ...] = ()


@dataclass(frozen=True)
class Peak:
    """Memory in three steps, the last two under a profiler; of a crew, the most of any rank.

    Attributes:
        bytes: the most that tensors take, as the profiler counts them.
        resident: the most that the process has resident in the first step, beyond what it had before its system was
            built; code that compilers brought along and shared memory are in it.
        losses: of the steps.
    """

    bytes: int
    resident: int
    losses: tuple[float, ...]


def this_host(rank: int) -> Mapping[str, str]:
    """All ranks on this host, connected by its loopback."""
    return {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo"}


class Crew:
    """The processes of a system. Use as a context: they end with it."""

    def __init__(
        self,
        build: Callable[[Job], System],
        job: Job,
        timeout: float,
        enter: Enter = this_host,
    ) -> None:
        """Start the processes; `ready` waits for them.

        Args:
            build: makes the system of one rank.
            job: of rank 0.
            timeout: seconds that an answer may take.
            enter: what each rank does first.
        """
        self._timeout = timeout
        port = str(free_port())
        self._ends: list[Connection] = []
        self._processes = []
        for rank in range(job.ranks):
            ours, theirs = FORK.Pipe()
            own = replace(job, rank=rank)
            process = FORK.Process(target=serve, args=(theirs, build, own, port, timeout, enter))
            process.start()
            theirs.close()
            self._ends.append(ours)
            self._processes.append(process)

    def __enter__(self) -> Crew:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for end in self._ends:
            with suppress(OSError):  # it has ended
                end.send(("stop", None))
        deadline = time.monotonic() + (10 if kind is None else 1)
        for process in self._processes:
            process.join(max(0.0, deadline - time.monotonic()))
            if process.is_alive():
                process.kill()
                process.join()
        for end in self._ends:
            end.close()

    @property
    def processes(self) -> list[int]:
        """The ids of the processes of all ranks."""
        return [process.pid for process in self._processes if process.pid is not None]

    def ready(self) -> tuple[float, float]:
        """Seconds to build the system and run its first step, the slowest rank's, and that step's loss."""
        answers = self._answers()
        return max(seconds for seconds, _ in answers), answers[0][1]

    def turn(self, steps: int) -> Turn:
        """Run steps on all ranks at once."""
        turns: list[Turn] = self._ask("turn", steps)
        slowest = max(turns, key=lambda turn: turn.seconds)
        return replace(slowest, idle=max(turn.idle for turn in turns))

    def peak(self) -> Peak:
        """What tensors and processes take, seen in three more steps."""
        peaks: list[Peak] = self._ask("peak", None)
        most, resident = (
            max(getattr(each, name) for each in peaks) for name in ("bytes", "resident")
        )
        return replace(peaks[0], bytes=most, resident=resident)

    def predict(self) -> list[Mapping[str, Any]]:
        """What each rank's system predicts of a step."""
        return self._ask("predict", None)

    def _ask(self, command: str, argument: Any) -> list[Any]:
        for end in self._ends:
            with suppress(OSError):  # it has ended: the answers say so
                end.send((command, argument))
        return self._answers()

    def _answers(self) -> list[Any]:
        """Of all ranks.

        Raises:
            SystemFailure: at the first rank that fails, or when one takes too long.
        """
        found: dict[int, Any] = {}
        deadline = time.monotonic() + self._timeout
        while len(found) < len(self._ends):
            missing = [end for rank, end in enumerate(self._ends) if rank not in found]
            answered = wait(missing, max(0.0, deadline - time.monotonic()))
            if not answered:
                raise SystemFailure(f"no answer within {self._timeout:.0f} s")
            for end in answered:
                rank = self._ends.index(end)  # type: ignore[arg-type]
                found[rank] = self._answer(rank)
        return [found[rank] for rank in range(len(self._ends))]

    def _answer(self, rank: int) -> Any:
        try:
            error, value = self._ends[rank].recv()
        except (EOFError, OSError) as ended:
            process = self._processes[rank]
            process.join(5)
            raise SystemFailure(f"rank {rank} ended with exit code {process.exitcode}") from ended
        if error:
            raise SystemFailure(f"rank {rank}: {error}")
        return value


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("", 0))
        return int(probe.getsockname()[1])


def serve(
    pipe: Connection,
    build: Callable[[Job], System],
    job: Job,
    port: str,
    timeout: float,
    enter: Enter,
) -> None:
    """One rank: build the system, then do what the pipe says; errors go back through it."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the coordinator stops us
    try:
        os.environ.update(enter(job.rank), MASTER_PORT=port)
        torch.set_num_threads(1)
        # Some hundred steps of one batch end at a loss of zero, and gradients so small that cores take four times as
        # long for each; threads take it over from whom starts them.
        torch.set_flush_denormal(True)
        if job.ranks > 1:
            start_job(job, timeout)
        start, before = time.perf_counter(), resident_bytes()
        system = build(job)
        loss = system.step()
        pipe.send((None, (time.perf_counter() - start, loss)))
        obey(pipe, system, job, before)
    except EOFError:
        pass  # the coordinator is gone
    except BaseException as error:
        traceback.print_exc()
        pipe.send((traceback.format_exception_only(error)[-1].strip(), None))
        os._exit(1)  # threads that wait for peers must not hold us


def start_job(job: Job, timeout: float) -> None:
    os.environ.update(
        RANK=str(job.rank),
        WORLD_SIZE=str(job.ranks),
        LOCAL_RANK=str(job.rank),
        LOCAL_WORLD_SIZE=str(job.ranks),
    )
    dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))


def obey(pipe: Connection, system: System, job: Job, before: int) -> None:
    """Do what the coordinator asks until it says stop.

    Args:
        before: bytes that were resident before the system was built.
    """
    rested, used = time.perf_counter(), time.process_time()
    while True:
        command, argument = pipe.recv()
        if command == "stop":
            break
        rest = time.perf_counter() - rested
        idle = (time.process_time() - used) / rest if rest > REST else 0.0
        if command == "turn":
            pipe.send((None, timed(system, argument, idle, job.ranks)))
        elif command == "predict":
            pipe.send((None, system.predict()))
        else:
            pipe.send((None, measured(system, before)))
        rested, used = time.perf_counter(), time.process_time()
    system.close()
    if job.ranks > 1:
        dist.destroy_process_group()


def timed(system: System, steps: int, idle: float, ranks: int) -> Turn:
    """Steps after a barrier."""
    if ranks > 1:
        dist.barrier()
    losses, ends = [], [time.perf_counter()]
    for _ in range(steps):
        losses.append(system.step())
        ends.append(time.perf_counter())
    each = tuple(after - before for before, after in pairwise(ends))
    return Turn((ends[-1] - ends[0]) / steps, tuple(losses), idle, each)


def measured(system: System, before: int) -> Peak:
    losses: list[float] = []

    def step() -> None:
        losses.append(system.step())

    resident = peak_resident_bytes(step) - before
    most = max(peak_bytes(step), system.peak())
    return Peak(most, resident, tuple(losses))


def crew_of(
    build: Callable[[Job], System], job: Job, timeout: float, losses: int
) -> Sequence[float]:
    """The losses of the first steps of a system on this host, whose processes end again."""
    with Crew(build, job, timeout) as crew:
        _, first = crew.ready()
        return (first, *crew.turn(losses - 1).losses)
