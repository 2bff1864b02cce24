"""Workers go on when a job is told to end, and end with their loop."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from errno import ENOSPC
from multiprocessing import active_children

import pytest
from torch.utils.data import DataLoader, Dataset

import weft
from weft.errors import UserError
from weft.program.data.samples import begin_worker, with_workers


class Signalled(Dataset[int]):
    """Sends its process a signal before each sample."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __len__(self) -> int:
        return 6

    def __getitem__(self, number: int) -> int:
        os.kill(os.getpid(), self.number)
        return number


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGUSR1])
def test_workers_go_on(number: int) -> None:
    loader = weft.Loader(Signalled(number), 2, workers=1)
    assert [each.tolist() for each in loader] == [[0, 1], [2, 3], [4, 5]]


def test_workers_are_killed_where_they_are_asked_to_end() -> None:
    loader = DataLoader(Signalled(signal.SIGTERM), num_workers=1, worker_init_fn=begin_worker)
    before = set(active_children())
    loop = with_workers(loader)
    next(loop)
    (worker,) = set(active_children()) - before
    assert worker.terminate == worker.kill


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
    done = subprocess.run([sys.executable, "-c", STUCK], timeout=60, capture_output=True)
    assert done.returncode == 0
    assert b"stuck" in done.stdout
    assert done.stderr == b""


class Slow(Dataset[int]):
    """Takes the signal of a job's end while its worker is made from the file that it is pickled to."""

    def __init__(self) -> None:
        self.signal = signal.SIGTERM

    def __setstate__(self, state: dict[str, int]) -> None:
        os.kill(os.getpid(), state["signal"])

    def __len__(self) -> int:
        return 2

    def __getitem__(self, number: int) -> int:
        return number


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_a_worker_that_is_told_to_end_before_it_has_begun_goes_on(
    method: str,
) -> None:
    before = multiprocessing.get_start_method()
    multiprocessing.set_start_method(method, force=True)
    try:
        loader = weft.Loader(Slow(), 2, workers=1)
        assert [each.tolist() for each in loader] == [[0, 1]]
    finally:
        multiprocessing.set_start_method(before, force=True)


class Leaving(Slow):
    """Its process is told to end by the sample itself."""

    def __setstate__(self, state: dict[str, int]) -> None: ...

    def __getitem__(self, number: int) -> int:
        sys.exit(3)


def test_a_worker_whose_sample_ends_it_is_told() -> None:
    with pytest.raises(UserError, match="a worker process has ended"):
        list(weft.Loader(Leaving(), 2, workers=1))


def test_without_workers_the_start_method_is_left_to_the_user() -> None:
    """As it is once something has asked for it: `multiprocessing.set_start_method` would refuse then."""
    code = (
        "import multiprocessing, weft; list(weft.Loader([1, 2], 2)); "
        "assert multiprocessing.get_start_method(allow_none=True) is None"
    )
    subprocess.run([sys.executable, "-c", code], timeout=60, check=True)


def test_an_error_of_the_sampler_s_own_is_no_worker_s() -> None:
    class Reading:
        def __iter__(self) -> Iterator[int]:
            raise FileNotFoundError("order.txt")

    with pytest.raises(FileNotFoundError, match=r"order\.txt"):
        list(weft.Loader([1, 2], 2, workers=1, sampler=Reading()))


class Stuck(Signalled):
    """Never gives its fourth sample."""

    def __getitem__(self, number: int) -> int:
        if number == 3:
            threading.Event().wait()
        return number


@pytest.mark.slow
def test_workers_that_hang_are_waited_for_so_long() -> None:
    found = iter(weft.Loader(Stuck(0), 2, workers=1, timeout=0.5))
    assert next(found).tolist() == [0, 1]
    with pytest.raises(UserError, match=r"no batch within timeout=0.5 s"):
        next(found)


@pytest.mark.parametrize("timeout", [-1, True, "1", float("nan")])
def test_no_time_out_is_told(timeout: object) -> None:
    with pytest.raises(UserError, match="timeout must be seconds from 0"):
        weft.Loader(Signalled(0), 2, timeout=timeout)  # type: ignore[arg-type]


def unsendable(samples: list[int]) -> object:
    return lambda: samples


def test_a_batch_that_cannot_be_sent_ends_the_loop(capfd: pytest.CaptureFixture[str]) -> None:
    loader = weft.Loader(Stuck(0), 2, workers=1, collate_fn=unsendable)
    with pytest.raises(UserError, match="a worker process has ended.* /dev/shm .* TMPDIR"):
        next(iter(loader))
    assert "pickle" in capfd.readouterr().err


def test_a_host_without_room_for_workers_is_told() -> None:
    class Full:
        def __iter__(self) -> Iterator[int]:
            raise OSError(ENOSPC, "No space left on device")

    with pytest.raises(UserError, match="cannot be started: .*No space left.* /dev/shm"):
        with_workers(Full())
