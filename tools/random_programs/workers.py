"""Cases in a process of their own: one that hangs or crashes ends its process, not the run."""

from __future__ import annotations

import multiprocessing
import warnings
from multiprocessing.connection import Connection

import torch

from tools.random_programs.judge import Verdict, judge
from tools.random_programs.large import act_large
from tools.random_programs.text import namespace

LIMIT = 300.0  # seconds that one case may take; ranks that wait for each other end sooner
EACH = 200  # cases after which a process is started anew, so that nothing piles up


class Worker:
    """One process that judges one script at a time."""

    def __init__(self, limit: float = LIMIT, large: bool = False) -> None:
        self._limit = limit
        self._large = large
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("fork")
        self._connection, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._large), daemon=True)
        self._process.start()
        self._done = 0
        other.close()

    def judge(self, text: str, name: str) -> Verdict:
        """The verdict on a script."""
        self._connection.send((text, name))
        if not self._connection.poll(self._limit):
            self._restart()
            return Verdict("hang", f"took more than {self._limit:g} s")
        try:
            found: Verdict = self._connection.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self._restart()
            return Verdict("internal", f"ended the process with exit code {code}")
        self._done += 1
        if self._done >= EACH:
            self._restart()
        return found

    def _restart(self) -> None:
        self.stop()
        self._start()

    def stop(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


def _serve(connection: Connection, large: bool) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if large:
        act_large()
    while True:
        try:
            text, name = connection.recv()
        except EOFError:
            return
        connection.send(judge(namespace(text, name)))
