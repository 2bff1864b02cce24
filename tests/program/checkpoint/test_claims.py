"""A folder of checkpoints is one job's until its program is closed."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest
import torch

import weft
from program.data.datasets import example, loss_fn, net
from weft.errors import UserError
from weft.program.checkpoint.checkpoints import LOCK

SIZE = 4
# Of another job: it locks a folder as weft does, and says whether it could.
OTHER = f"""
import fcntl, sys
lock = open(sys.argv[1] + "/{LOCK}", "a+")
try:
    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
except OSError:
    print("taken: " + (lock.seek(0) and "" or lock.read()), flush=True)
else:
    lock.truncate(0), lock.write("process 7 of host far"), lock.flush()
    print("free", flush=True)
    sys.stdin.read()
"""


@contextmanager
def other(folder: Path) -> Iterator[str]:
    """Another job; says whether it has the folder."""
    with subprocess.Popen(
        [sys.executable, "-c", OTHER, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()


def compiled() -> weft.Program:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return weft.compile(
        *(model, loss_fn, optimizer, example(SIZE)), placement=weft.placement("cpu", [0])
    )


def test_a_folder_is_of_one_job(tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path)
    with other(tmp_path) as found, closing(compiled()) as program:
        assert found == "free"
        with pytest.raises(UserError, match="process 7 of host far saves to .*end the other job"):
            kept.save(program)
        with pytest.raises(UserError, match="process 7 of host far"):
            weft.fit(program, [example(SIZE)], steps=1, checkpoint=kept)
        assert (program.steps, kept.all()) == (0, [])
    with closing(compiled()) as program:
        kept.save(program)
        shutil.copytree(tmp_path, tmp_path.with_name("copy"))  # reads the lock's file
        with other(tmp_path) as found:
            assert found.startswith("taken: process ")
        kept.save(program)
    with other(tmp_path) as found:
        assert found == "free"


def test_a_folder_by_two_names_is_one(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "run")
    with closing(compiled()) as first, closing(compiled()) as second:
        weft.Checkpoints(tmp_path / "run").save(first)
        with pytest.raises(UserError, match="another open program saves to"):
            weft.Checkpoints(tmp_path / "link").save(second)


def test_who_loads_leaves_the_folder_of_another_job_as_it_is(tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path)
    with closing(compiled()) as program:
        kept.save(program)
        (tmp_path / "step-00000000").rename(tmp_path / ".step-00000000.1.replaced")
    with closing(compiled()) as program:
        with other(tmp_path):
            assert kept.load_newest(program) is None
        assert kept.load_newest(program) == {}


def test_a_program_that_is_gone_has_no_folder(tmp_path: Path) -> None:
    program = compiled()
    weft.Checkpoints(tmp_path).save(program)
    del program
    with other(tmp_path) as found:
        assert found == "free"


@pytest.mark.parametrize("call", ["save", "save_when_due", "load_newest"])
def test_what_is_no_program_is_refused(call: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"must be a weft\.Program, got 3"):
        getattr(weft.Checkpoints(tmp_path), call)(3)
