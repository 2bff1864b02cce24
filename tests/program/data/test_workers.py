"""Workers go on when a job is told to end, and end with their loop."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
from torch.utils.data import DataLoader, Dataset

import weft
from weft.program.data.workers import Workers


class Signalled(Dataset[int]):
    """Sends its process a signal before each sample."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> int:
        os.kill(os.getpid(), self.number)
        return number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_workers_go_on(number: int) -> None:
    loader = weft.Loader(Signalled(number), 2, workers=1)
    assert [each.tolist() for each in loader] == [[0, 1], [2, 3], [4, 5]]


def test_workers_end_when_asked_to_once_their_loop_is_over() -> None:
    workers = Workers()
    with workers.loop(()) as loading:
        assert list(loading) == []
    ended = DataLoader(Signalled(signal.SIGTERM), num_workers=1, worker_init_fn=workers.begin)
    with pytest.raises(RuntimeError, match=r"exited unexpectedly|Terminated"):
        list(ended)


STUCK = """
import threading
import weft

class Stuck:
    def __len__(self):
        return 4

    def __getitem__(self, number):
        if number:
            print("stuck", flush=True)
            threading.Event().wait()
        return number

loop = iter(weft.Loader(Stuck(), 1, workers=1))
next(loop)
"""


@pytest.mark.slow
def test_a_worker_that_is_stuck_ends_with_its_process() -> None:
    done = subprocess.run([sys.executable, "-c", STUCK], timeout=60, stdout=subprocess.PIPE)
    assert done.returncode == 0
    assert b"stuck" in done.stdout
