"""Checkpoints that are written beside the next steps."""

from __future__ import annotations

import subprocess
import sys
import threading
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from program.checkpoint.nets import Case, assert_same, batch_of, compiled, everything
from single_device import processes
from weft.errors import UserError
from weft.program.checkpoint.files import checksum, summing
from weft.program.checkpoint.save import WriteJob, Writing

writing: Any = import_module("weft.program.checkpoint.save")

CASE = Case((2,), {"zero": weft.Zero(1)})


def test_it_holds_what_was_there_when_it_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where steps are made before anything is written."""
    stepped, plain = threading.Event(), writing.write_file

    def late(*arguments: Any) -> Any:
        assert stepped.wait(60)
        return plain(*arguments)

    monkeypatch.setattr(writing, "write_file", late)
    with compiled(CASE) as (program, _):
        program.step(batch_of(0))
        saved = everything(program)
        kept = torch.arange(3)
        program.save(tmp_path / "saved", {"kept": kept}, wait=False)
        kept += 1
        program.step(batch_of(1))
        assert not (tmp_path / "saved").exists()
        stepped.set()
        program.wait_for_saved()
        assert (tmp_path / "saved" / "weft.json").exists()
        program.step(batch_of(2))
        extra = program.load(tmp_path / "saved")
        assert_same(everything(program), saved)
        assert torch.equal(extra["kept"], torch.arange(3))
    assert sorted(each.name for each in tmp_path.iterdir()) == ["saved"]


def _full(*_: Any) -> Any:
    raise UserError("cannot write shard: No space left on device")


@pytest.mark.parametrize("call", ["save", "load", "wait_for_saved", "close"])
def test_what_failed_is_told_by_the_next_call(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with compiled(CASE) as (program, _):
        program.save(tmp_path / "first")
        with monkeypatch.context() as patch:
            patch.setattr(writing, "write_file", _full)
            program.save(tmp_path / "second", wait=False)
            paths = {"save": [tmp_path / "third"], "load": [tmp_path / "first"]}
            program.step(batch_of(0))
            with pytest.raises(UserError, match="No space left"):
                getattr(program, call)(*paths.get(call, []))
        if call != "close":
            program.save(tmp_path / "third")
        names = {"first", "third"} if call != "close" else {"first"}
        # Another process may still be about to remove what it has begun.
        beside = {"."} if processes() > 1 else set()
        found = {each.name for each in tmp_path.iterdir() if each.name[0] not in beside}
        assert found == names


def test_a_run_of_them(tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path, every=1, keep=2, wait=False)
    with compiled(CASE) as (program, _):
        for step in range(5):
            program.step(batch_of(step))
            kept.save_when_due(program)
        saved = everything(program)
    assert [each.name for each in kept.all()][-2:] == ["step-00000004", "step-00000005"]
    assert len(kept.all()) <= 3
    with compiled(Case((3,), seed=4)) as (program, _):
        kept.load_newest(program)
        assert_same(everything(program), saved)


def _job(folder: Path, rank: int) -> WriteJob:
    """The part of one of two processes."""
    pieces = {f"model.{rank}": (((0, 3),), torch.arange(3.0))}
    files = {f"shard-{rank + 1:05d}-model-00001.safetensors": pieces}
    tensors = {f"model.{each}": ((3,), "float32") for each in range(2)}
    return WriteJob(folder / "saved", folder / "beside", files, tensors, {}, rank, (0, 1))


def _one_too_many(*_: Any) -> Any:
    raise SystemExit(3)


@pytest.mark.parametrize("fails", [_full, _one_too_many], ids=["an error", "an exit"])
def test_on_a_full_disk_the_first_process_hears_of_another_s_failure(
    fails: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the files of that one are there, there is no room for its note."""
    (tmp_path / "beside").mkdir()
    write, note = writing.write_file, writing.write_atomically

    def cut_short(folder: Path, file: str, pieces: Any) -> Any:
        write(folder, file, pieces)
        fails()

    def noted(path: Path, text: str, what: str) -> None:
        if list(path.parent.glob("shard-00002*")):
            _full()
        note(path, text, what)

    monkeypatch.setattr(writing, "write_file", cut_short)
    monkeypatch.setattr(writing, "write_atomically", noted)
    other = Writing(_job(tmp_path, 1))
    with pytest.raises(UserError, match=r"No space left|SystemExit: 3"):
        other.wait()
    monkeypatch.setattr(writing, "write_file", write)
    monkeypatch.setattr(writing, "_PATIENCE", 3.0)
    with pytest.raises(UserError, match=r"rank 1: .*(No space left|SystemExit: 3)"):
        Writing(_job(tmp_path, 0)).wait()
    assert list(tmp_path.iterdir()) == []


ENDS = """
import concurrent.futures.thread as pool
import sys
import torch
import weft
from weft.program.checkpoint import save as writing

own = writing.write_file

def late(*given):
    while not pool._shutdown:
        pass
    return own(*given)

writing.write_file = late
model = torch.nn.Linear(3, 2)
program = weft.compile(
    *(model, lambda model, x: model(x).sum(), torch.optim.Adam(model.parameters()), torch.ones(4, 3)),
    placement=weft.placement("cpu", [0]),
)
program.step(torch.ones(4, 3))
program.save(sys.argv[1], wait=False)
"""


@pytest.mark.thorough
@pytest.mark.slow
def test_a_process_that_ends_writes_to_the_end(tmp_path: Path) -> None:
    """Also where it has not closed the program, and takes no work for pools of threads any more."""
    command = [sys.executable, "-c", ENDS, str(tmp_path / "saved")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    model = torch.nn.Linear(3, 2)
    program = weft.compile(
        *(model, lambda model, x: model(x).sum()),
        *(torch.optim.Adam(model.parameters()), torch.ones(4, 3)),
        placement=weft.placement("cpu", [0]),
    )
    program.load(tmp_path / "saved")
    assert program.steps == 1
    program.close()


def test_checksums_need_no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    tensors = [torch.arange(number) for number in range(9)]
    expected = [checksum(each) for each in tensors]
    assert summing(tensors)() == expected
    monkeypatch.setattr(threading.Thread, "start", start)
    assert summing(tensors)() == expected
