"""Checks in processes of their own: an op that crashes or hangs ends its worker, not the run."""

from __future__ import annotations

import multiprocessing
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar

from tools.opinfo.samples import full_name

Report = TypeVar("Report")

LIMIT = 120.0  # seconds that one op may take


def check_all(
    infos: Sequence[Any],
    check: Callable[[Any], Report],
    lost: Callable[[str, str], Report],
    jobs: int,
) -> Iterator[Report]:
    """The reports of all ops, in the order in which they are done.

    Args:
        infos: OpInfos.
        check: makes the report of one.
        lost: makes that of an op that ended its process, of its name and what happened.
        jobs: how many processes.
    """
    waiting = list(range(len(infos)))[::-1]
    workers = [_Worker(infos, check, lost) for _ in range(min(jobs, len(infos)))]
    for worker in workers:
        worker.give(waiting.pop())
    while busy := [worker for worker in workers if worker.op is not None]:
        ready = wait([worker.connection for worker in busy], timeout=1.0)
        for worker in busy:
            report = worker.report(worker.connection in ready)
            if report is None:
                continue
            yield report
            if waiting:
                worker.give(waiting.pop())
            else:
                worker.stop()


class _Worker(Generic[Report]):
    """One process that checks one op at a time; started anew when it died or hung.

    `op` is the number of the op that it works on, None when it has none.
    """

    def __init__(
        self,
        infos: Sequence[Any],
        check: Callable[[Any], Report],
        lost: Callable[[str, str], Report],
    ) -> None:
        self._infos = infos
        self._check = check
        self._lost = lost
        self.op: int | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self.connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._infos, self._check))
        self._process.start()
        other.close()

    def give(self, op: int) -> None:
        if not self._process.is_alive():
            self._start()
        self.op, self._since = op, time.monotonic()
        self.connection.send(op)

    def report(self, ready: bool) -> Report | None:
        """The report of the op when it is done or lost."""
        assert self.op is not None  # only asked while it works
        late = time.monotonic() - self._since > LIMIT
        if not ready and not late:
            return None
        name, self.op = full_name(self._infos[self.op]), None
        try:
            if ready:
                found: Report = self.connection.recv()
                return found
            why = f"took more than {LIMIT:g} s"
        except EOFError:
            self._process.join()
            why = f"ended the process with exit code {self._process.exitcode}"
        self.stop()
        return self._lost(name, why)

    def stop(self) -> None:
        self._process.kill()
        self._process.join()


def _serve(connection: Connection, infos: Sequence[Any], check: Callable[[Any], Any]) -> None:
    warnings.simplefilter("ignore")
    while True:
        began = connection.recv(), time.perf_counter()
        report = check(infos[began[0]])
        report.seconds = time.perf_counter() - began[1]
        connection.send(report)
