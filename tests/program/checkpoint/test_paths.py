"""Paths of checkpoints with names that mean something elsewhere."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

import weft
from program.checkpoint.nets import Case, batch_of, compiled
from weft.errors import UserError
from weft.program.checkpoint.exported import export
from weft.program.checkpoint.manifest import REPLACED, checkpoint_path, hidden_beside

pytestmark = pytest.mark.one_process_outside("one process reads and breaks what all have saved")


@pytest.mark.one_process("each process would move the files of all")
@pytest.mark.parametrize("name", ["a[1]", "a.b"])
def test_one_that_is_replaced_leaves_nothing(name: str, tmp_path: Path) -> None:
    with compiled(Case((2,))) as (program, _):
        for number in range(2):
            program.save(tmp_path / name, {"number": number}, replace=True)
        assert [path.name for path in tmp_path.iterdir()] == [name]
        # As where the run was killed between its two renames.
        (tmp_path / name).rename(tmp_path / f".{name}.abcd{REPLACED}")
        assert program.load(tmp_path / name) == {"number": 1}


def test_those_of_another_name_stay(tmp_path: Path) -> None:
    with compiled(Case()) as (program, _):
        program.save(tmp_path / "last")
        program.save(tmp_path / "last.best", {"best": 1})
        aside = tmp_path / f".last.best.abcd{REPLACED}"
        (tmp_path / "last.best").rename(aside)
        assert hidden_beside(tmp_path / "last", REPLACED) == []
        program.save(tmp_path / "last", replace=True)
        assert aside.exists()
        assert program.load(tmp_path / "last.best") == {"best": 1}


def test_a_name_that_is_too_long_is_told(tmp_path: Path) -> None:
    long = tmp_path / ("x" * 300)
    with compiled(Case()) as (program, _):
        program.step(batch_of(0))
        for call in (
            lambda: program.save(long),
            lambda: program.load(long),
            lambda: weft.Checkpoints(long).load_newest(program),
            lambda: weft.Checkpoints(long).save(program),
        ):
            with pytest.raises(UserError, match="cannot be at .*: File name too long"):
                call()


def test_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert checkpoint_path("~/run") == weft.Checkpoints("~/run").folder == tmp_path / "run"


def test_a_folder_has_the_mode_of_any_that_is_made_there(tmp_path: Path) -> None:
    """In one that all may write to, as /tmp, others must not write into a checkpoint."""
    tmp_path.chmod(0o1777)
    before = os.umask(0o027)
    try:
        with compiled(Case()) as (program, _):
            program.save(tmp_path / "saved")
        export(tmp_path / "saved", tmp_path / "out")
    finally:
        os.umask(before)
    modes = {path.name: oct(path.stat().st_mode & 0o7777) for path in tmp_path.glob("**/*")}
    assert modes.pop("saved") == modes.pop("out") == "0o750"
    assert set(modes.values()) == {"0o640"}
