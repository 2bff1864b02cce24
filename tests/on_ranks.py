"""Ranks as real processes, forked from one that has imported weft: a job takes a second, not five for every rank.

`run_ranks` is for tests; started as a program, this module is the process that forks, for one job after another.
"""

from __future__ import annotations

import atexit
import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, final

import pytest  # noqa: F401  (what is imported here, ranks need not import)
import torch

import weft
from weft.runtime.world.launch import MEETING
from weft.runtime.world.rendezvous import private_rendezvous

# Seconds that importing everything may take on a busy machine.
START = 100
# The line that says that a job is done.
DONE = "done\n"


def run_ranks(
    script: Path,
    size: int,
    *arguments: str,
    folder: Path | None = None,
    seconds: int = 200,
    **variables: str,
) -> list[tuple[str, int]]:
    """Run a script on every rank, as `weft run` does, but go on when one fails.

    Args:
        script: a program; it finds RANK, LOCAL_RANK and WORLD_SIZE in its environment.
        size: how many ranks.
        arguments: of the script.
        folder: where the script is run.
        seconds: after which a rank that hangs says where, and ends with exit code 1.
        variables: of the environment; with MASTER_PORT the ranks meet there, else in a file.

    Returns:
        for each rank what it wrote to stdout and stderr, and its exit code.
    """
    with tempfile.TemporaryDirectory(prefix="weft-") as own:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
        job = own, str(folder or Path.cwd()), environment, size, seconds, str(script), arguments
        _forking().do(job, START + seconds)
        codes = json.loads(Path(own, "codes").read_text())
        return [(Path(own, str(rank)).read_text(), code) for rank, code in enumerate(codes)]


@final
class _Forking:
    """The process that forks, as seen by who has jobs for it."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        atexit.register(self.end)

    def do(self, job: Any, limit: float) -> None:
        """Have a job done, within so many seconds."""
        asked, told = self._process.stdin, self._process.stdout
        assert asked is not None
        assert told is not None
        asked.write(json.dumps(job) + "\n")
        asked.flush()
        ready, _, _ = select.select([told], [], [], limit)
        if not ready or told.readline() != DONE:
            self.end()
            raise RuntimeError(f"ranks did not end within {limit} s, or who forks them has failed")

    def end(self) -> None:
        """End it with all that it has forked."""
        _forking.cache_clear()
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.communicate()


# The forking processes of those that this one was forked from.
_OF_PARENTS: list[_Forking] = []


@cache
def _forking() -> _Forking:
    return _Forking()


def forget() -> None:
    """In a process that was forked: leave the forking process to the parent, whose child it is."""
    if _forking.cache_info().currsize:
        _OF_PARENTS.append(_forking())  # kept: its end would warn of a child that still runs
    _forking.cache_clear()


def passed(script: Path, size: int, *arguments: str, **options: Any) -> list[str]:
    """What each rank wrote, where all of them ended well."""
    ended = run_ranks(script, size, *arguments, **options)
    assert all(code == 0 for _, code in ended), "\n".join(output[-3000:] for output, _ in ended)
    return [output for output, _ in ended]


def warm() -> None:
    """Compile once here: what is looked up on the way is there in all ranks."""
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU()), torch.ones(2, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    placement = weft.placement("cpu", [0, 1])
    with weft.local_world(2):
        program = weft.compile(model, _loss, optimizer, x, placement=placement)
        program.step(x)
        program.close()


def _loss(model: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = model(x).square().mean()
    return loss


def _serve() -> None:
    """Do the jobs that come; in each process that is forked for one, return after it, and end as any process does."""
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            own, folder, environment, *job = json.loads(line)
            os.environ.clear()
            os.environ.update(environment)
            os.chdir(folder)
            os.dup2(os.open(os.devnull, os.O_RDONLY), sys.stdin.fileno())
            _run(Path(own), *job)
            return
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]):
            return
        sys.stdout.write(DONE)
        sys.stdout.flush()


def _run(folder: Path, size: int, seconds: int, script: str, arguments: list[str]) -> None:
    children = []
    for rank in range(size):
        child = os.fork()
        if child == 0:
            _be(rank, folder, size, seconds)
            sys.argv = [script, *arguments]
            sys.path[0] = str(Path(script).parent)
            runpy.run_path(script, run_name="__main__")
            return
        children.append(child)
    codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    (folder / "codes").write_text(json.dumps(codes))


def _be(rank: int, folder: Path, size: int, seconds: int) -> None:
    output = os.open(folder / str(rank), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, sys.stdout.fileno())
    os.dup2(output, sys.stderr.fileno())
    faulthandler.enable()
    faulthandler.dump_traceback_later(seconds, exit=True)
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    if "MASTER_PORT" not in os.environ:
        os.environ[MEETING] = str(folder / "meeting")
    private_rendezvous()


if __name__ == "__main__":
    torch.set_num_threads(1)
    warm()
    assert threading.active_count() == 1, "a process with threads cannot be forked"
    gc.freeze()
    _serve()
