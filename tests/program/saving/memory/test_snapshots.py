"""Snapshots in memory of one host: what goes on from them, and what becomes of torn, damaged and refused ones."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from program.saving.nets import Case, assert_same, batch_of, compiled, everything
from weft.errors import UserError
from weft.program.saving.memory import places, plan, reading, taking
from weft.program.saving.memory.places import RECORD, UNSURE

# Of several processes, each has records of its own.
ONE = pytest.mark.one_process("it reads and breaks what one process has left")
WIDE = Case((2,), {"zero": weft.Zero(3)})


@pytest.fixture(autouse=True)
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of this host."""
    found = tmp_path / "host"
    found.mkdir(mode=0o700)
    monkeypatch.setenv("WEFT_SNAPSHOTS", str(found))
    return found


def kept_in(tmp_path: Path, **options: Any) -> weft.Checkpoints:
    return weft.Checkpoints(tmp_path / "run", **{"every": 100, "memory_every": 1, **options})


@contextmanager
def trained(
    kept: weft.Checkpoints, steps: int, case: Case = WIDE, **extra: Any
) -> Iterator[tuple[weft.Program, list[float]]]:
    """A program that goes on from the newest, up to so many steps; and the losses of those that it made."""
    with compiled(case) as (program, _):
        kept.load_newest(program)
        losses = []
        while program.steps < steps:
            losses.append(float(program.step(batch_of(program.steps))))
            kept.save_when_due(program, extra)
        yield program, losses


def records(host: Path, name: str = RECORD) -> list[Path]:
    """The records that are there, by the step that they are of."""
    found = host.rglob(name)
    return sorted(
        found, key=lambda path: int(path.read_text().rpartition('"step": ')[2].split(",")[0])
    )


@pytest.mark.parametrize(
    "case",
    [
        Case((3,)),
        pytest.param(WIDE, marks=pytest.mark.thorough),
        pytest.param(Case((2, 2), {"zero": weft.Zero(1)}), marks=pytest.mark.thorough),
    ],
)
def test_a_run_goes_on_in_any_layout(case: Case, tmp_path: Path) -> None:
    kept = kept_in(tmp_path)
    whole = torch.arange(3.0)
    with trained(kept, 3, mine=[whole, {"a": 1}]) as (program, _):
        saved = everything(program)
        program.step(batch_of(3))  # this one is lost
    assert not (tmp_path / "run").exists()
    with compiled(Case(case.grid, case.entries, seed=4)) as (program, _):
        found = kept.load_newest(program)
        assert program.steps == 3
        assert found is not None
        assert found["mine"][1] == {"a": 1}
        assert torch.equal(found["mine"][0], whole)
        assert_same(everything(program), saved)


def test_the_next_steps_have_the_same_bits(tmp_path: Path) -> None:
    with trained(kept_in(tmp_path, memory_every=None), 6) as (program, losses):
        expected = everything(program)
    kept = kept_in(tmp_path, memory_every=2)
    with trained(kept, 5) as (_, first):
        assert first == losses[:5]
    with trained(kept, 6) as (program, second):
        assert second == losses[4:]  # step 5 was made again
        assert_same(everything(program), expected)


def test_two_generations_are_there(tmp_path: Path, host: Path) -> None:
    kept = kept_in(tmp_path, memory_every=2)
    with trained(kept, 9) as (program, _):
        assert program.saved_in_memory(kept.folder) == [6, 8]
        files = {path for path in host.rglob("*") if path.is_file()}
        program.step(batch_of(9))
        kept.save_when_due(program)
        assert program.saved_in_memory(kept.folder) == [8, 10]
        assert {path for path in host.rglob("*") if path.is_file()} == files


@ONE
def test_what_earlier_starts_have_left_goes_once_there_is_a_new_one(
    tmp_path: Path, host: Path
) -> None:
    kept = kept_in(tmp_path)
    with trained(kept, 3):
        pass
    assert len(records(host)) == 2
    with compiled(WIDE) as (program, _):
        kept.load_newest(program)
        program.step(batch_of(3))
        program.save_in_memory(kept.folder)
        # Only what the run went on from, until the new one counts.
        program.wait_for_memory()
        (left,) = records(host)
        assert left.parts[-4] == "start-00002"


@ONE
def test_a_damaged_file_is_named_and_the_generation_before_taken(
    tmp_path: Path, host: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_in(tmp_path)
    with trained(kept, 2) as (program, _):
        saved = everything(program)
        program.step(batch_of(2))
        kept.save_when_due(program)
    shard = next(records(host)[-1].parent.glob("shard-*"))
    with shard.open("r+b") as opened:
        opened.seek(-3, os.SEEK_END)
        opened.write(b"?!?")
    with compiled(Case((3,), seed=4)) as (program, _), caplog.at_level(logging.WARNING):
        kept.load_newest(program)
        assert program.steps == 2
        assert_same(everything(program), saved)
    assert f"{shard.name} (" in caplog.text
    assert "its values are not those that were written" in caplog.text
    assert not list(host.rglob("view"))


@ONE
def test_a_torn_generation_does_not_count(tmp_path: Path, host: Path) -> None:
    """What was being written, what not all had, and a file that is too short."""
    kept = kept_in(tmp_path)
    with trained(kept, 3) as (program, _):
        assert program.saved_in_memory(kept.folder) == [2, 3]
        newest = records(host)[-1]
        shard, text = next(newest.parent.glob("shard-*")), newest.read_text()
        for name in ("launcher", UNSURE):
            newest.rename(newest.with_name(name))
            assert program.saved_in_memory(kept.folder) == [2]
            newest.with_name(name).unlink()
            newest.write_text(text)
        size = shard.stat().st_size
        os.truncate(shard, size - 1)
        assert program.saved_in_memory(kept.folder) == [2]
        os.truncate(shard, size)
        newest.write_text(text[:-1])
        assert program.saved_in_memory(kept.folder) == [2]


def test_a_run_that_dies_while_a_snapshot_is_written_has_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is of an earlier start."""
    kept = kept_in(tmp_path)
    with trained(kept, 2) as (program, _):
        program.wait_for_memory()
        with monkeypatch.context() as patch:
            patch.setattr(taking.TakenSnapshot, "_run", lambda _: None)
            program.step(batch_of(2))
            kept.save_when_due(program)
    for _ in range(2):
        with compiled(WIDE) as (program, _), monkeypatch.context() as patch:
            patch.setattr(taking.TakenSnapshot, "_run", lambda _: None)
            assert program.saved_in_memory(kept.folder) == [2]
            kept.load_newest(program)
            assert program.steps == 2
            program.step(batch_of(2))
            program.save_in_memory(kept.folder)
            assert program._snapshots[kept.folder]._taking is not None
            program._snapshots[kept.folder]._taking = None  # nobody waits for it any more


def test_where_memory_has_nothing_whole_the_checkpoint_on_disk_is_taken(
    tmp_path: Path, host: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_in(tmp_path, every=2)
    with trained(kept, 4):
        pass
    for record in records(host):
        for shard in record.parent.glob("shard-*"):
            shard.write_bytes(bytes(shard.stat().st_size))
    with compiled(WIDE) as (program, _), caplog.at_level(logging.WARNING):
        assert [name for _, name in kept._with_snapshots(program, ["step-00000004"])] == [
            "",
            "",
            "step-00000004",
        ]
        kept.load_newest(program)
        assert program.steps == 4
    # That of step 4 on disk is newer than those of steps 1 and 3.
    assert not caplog.text
    for each in kept.all():
        (each / "weft.json").write_text("{}")
    with compiled(WIDE) as (program, _), pytest.raises(UserError, match="no checkpoint in"):
        kept.load_newest(program)


def test_where_memory_is_full_when_a_run_goes_on_the_checkpoint_on_disk_is_taken(
    tmp_path: Path, host: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_in(tmp_path, every=2)
    with trained(kept, 3):
        pass
    monkeypatch.setattr(reading, "manifest_text", _full)
    with compiled(WIDE) as (program, _), caplog.at_level(logging.WARNING):
        kept.load_newest(program)
        assert program.steps == 2
    assert "No space left on device; give memory file systems more room" in caplog.text


def test_where_all_is_lost_before_the_first_checkpoint_a_run_begins_anew(
    tmp_path: Path, host: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_in(tmp_path)
    with trained(kept, 2):
        pass
    for record in records(host):
        record.write_text(record.read_text().replace('"sums": [', '"sums": [1, '))
    with compiled(WIDE) as (program, _), caplog.at_level(logging.WARNING):
        assert kept.load_newest(program) is None
        assert program.steps == 0
    assert "a record of the snapshot of step 2 in memory is damaged" in caplog.text


def _full(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@ONE
@pytest.mark.parametrize("found", ["before", "while files are made"])
def test_without_room_a_line_says_so_and_the_run_goes_on(
    found: str,
    tmp_path: Path,
    host: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if found == "before":
        monkeypatch.setattr(plan, "free_bytes", lambda _: 100)
    else:
        monkeypatch.setattr(os, "posix_fallocate", _full)
    kept = kept_in(tmp_path, every=3)
    with caplog.at_level(logging.WARNING), trained(kept, 5) as (program, losses):
        assert len(losses) == 5
        assert program.saved_in_memory(kept.folder) == []
    (told,) = caplog.messages
    assert told.endswith("the run goes on with its checkpoints on disk")
    assert ("two generations take" if found == "before" else "No space left on device") in told
    assert [each.name for each in kept.all()] == ["step-00000003"]
    assert not [path for path in host.rglob("*") if path.is_file()]


@ONE
def test_one_that_cannot_be_finished_is_dropped_and_the_one_before_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kept = kept_in(tmp_path)
    with trained(kept, 2) as (program, _), caplog.at_level(logging.WARNING):
        program.wait_for_memory()
        with monkeypatch.context() as patch:
            patch.setattr(taking, "_written", lambda _: "cannot write into x: No space left")
            for step in (2, 3):
                program.step(batch_of(step))
                kept.save_when_due(program)
            program.wait_for_memory()
        assert len(caplog.messages) == 2
        assert program.saved_in_memory(kept.folder) == [2]
        program.step(batch_of(4))
        kept.save_when_due(program)
        assert program.saved_in_memory(kept.folder) == [2, 5]
    assert "the snapshot of step 3 in memory was dropped: " in caplog.text


def test_the_older_of_two_is_not_written_over_when_it_alone_is_whole(
    tmp_path: Path, host: Path
) -> None:
    kept = kept_in(tmp_path)
    with trained(kept, 2) as (program, _):
        program.wait_for_memory()
        program.load_from_memory(kept.folder, 1)
        program.step(batch_of(1))
        program.save_in_memory(kept.folder)
        assert 1 in program.saved_in_memory(kept.folder)


def test_what_no_checkpoint_takes_is_refused(tmp_path: Path) -> None:
    kept = kept_in(tmp_path)
    with compiled(WIDE) as (program, _):
        program.step(batch_of(0))
        with pytest.raises(UserError, match="extra.mine is a object"):
            kept.save_when_due(program, {"mine": object()})
        program.step(batch_of(1), update=False)
        with pytest.raises(UserError, match="program.save_in_memory: gradients wait"):
            kept.save_when_due(program)


@pytest.mark.parametrize("variable", ["", "open"])
def test_a_folder_is_needed_that_others_cannot_read(
    variable: str, tmp_path: Path, host: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if variable:
        host.chmod(0o755)
    else:
        monkeypatch.setenv("WEFT_SNAPSHOTS", "")
    match = "others may read .* run `chmod 700" if variable else "start the script with weft run"
    with compiled(Case()) as (program, _), pytest.raises(UserError, match=match):
        kept_in(tmp_path).load_newest(program)


def test_room_counts_the_host_s_memory(tmp_path: Path) -> None:
    assert (
        0 < places.free_bytes(tmp_path) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    )
