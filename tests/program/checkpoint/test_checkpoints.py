"""The checkpoints of a run: when they are written, which stay, and which is loaded."""

from __future__ import annotations

import json
import logging
from errno import ENOSPC
from pathlib import Path
from typing import Any

import pytest
import torch

import weft
from program.checkpoint.nets import Case, assert_same, batch_of, compiled, everything
from weft.errors import UserError
from weft.program.checkpoint import save as writing

pytestmark = pytest.mark.one_process_outside("one process reads and breaks what all have saved")


def names(folder: Path) -> list[int]:
    return [int(each.name.removeprefix("step-")) for each in sorted(folder.glob("step-*"))]


def test_the_newest_stay_and_the_best(tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path / "run", every=2, keep=2)
    scores = {2: 3.0, 4: 1.0, 6: 2.0, 8: 5.0, 10: 4.0}
    with compiled(Case((2,))) as (program, _):
        for step in range(1, 11):
            program.step(batch_of(step))
            written = kept.save_when_due(program, score=scores.get(step))
            assert (written is not None) == (step in scores)
    assert names(tmp_path / "run") == [4, 8, 10]


def test_without_scores_only_the_newest_stay(tmp_path: Path) -> None:
    kept = weft.Checkpoints(str(tmp_path / "run"), every=1, keep=1)
    with compiled(Case()) as (program, _):
        assert kept.load_newest(program) is None
        for step in range(3):
            program.step(batch_of(step))
            kept.save(program, {"number": step})
    assert names(tmp_path / "run") == [3]
    with compiled(Case((3,))) as (program, _):
        assert kept.load_newest(program) == {"number": 2}
        assert program.steps == 3


def test_what_is_there_stays_until_another_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = weft.Checkpoints(tmp_path, every=1)
    with compiled(Case((2,))) as (program, _):
        program.step(batch_of(0))
        kept.save(program, {"number": 1})
        with pytest.raises(UserError, match="score must be a number"):
            kept.save(program, score="low")  # type: ignore[arg-type]
        with monkeypatch.context() as patch:
            patch.setattr(writing, "write_file", _full)
            with pytest.raises(OSError, match="No space left"):
                kept.save(program, {"number": 2})
        assert names(tmp_path) == [1]
        assert kept.load_newest(program) == {"number": 1}
        kept.save(program, {"number": 3})
        assert names(tmp_path) == [1]
        assert kept.load_newest(program) == {"number": 3}


def _full(*_: object) -> None:
    raise OSError(ENOSPC, "No space left on device")


@pytest.mark.one_process("each process would move the files of all")
def test_one_that_was_about_to_be_replaced_is_put_back(tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path, every=1)
    with compiled(Case((2,))) as (program, _):
        program.step(batch_of(0))
        kept.save(program, {"number": 1}).rename(tmp_path / ".step-00000001.x.replaced")
        assert kept.load_newest(program) == {"number": 1}
        (tmp_path / ".step-00000001.y.replaced").mkdir()
        kept.save(program)
    assert names(tmp_path) == [1]


def test_a_damaged_one_is_named_and_the_one_before_taken(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = weft.Checkpoints(tmp_path, every=1)
    with compiled(Case((2,))) as (program, _):
        program.step(batch_of(0))
        kept.save(program)
        saved = everything(program)
        program.step(batch_of(1))
        newest = kept.save(program)
    shard = min(newest.glob("shard-*"))
    shard.write_bytes(shard.read_bytes()[:-5])
    # What was being written when its run ended is none.
    (tmp_path / ".step-00000003.partial").mkdir()
    with compiled(Case((2,), seed=4)) as (program, _), caplog.at_level(logging.WARNING):
        assert kept.load_newest(program) == {}
        assert program.steps == 1
        assert_same(everything(program), saved)
    assert str(shard) in caplog.text
    (tmp_path / "step-00000001" / "weft.json").write_text("{}")
    with compiled(Case((2,))) as (program, _), pytest.raises(UserError, match="no checkpoint in"):
        kept.load_newest(program)


def test_a_damaged_one_is_replaced_when_the_run_comes_there_again(tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path, every=1, keep=5)
    with compiled(Case((2,))) as (program, _):
        for step in range(2):
            program.step(batch_of(step))
            kept.save(program)
        saved = everything(program)
    (tmp_path / "step-00000002" / "weft.json").write_text("{")
    with compiled(Case((2,))) as (program, _):
        kept.load_newest(program)
        assert program.steps == 1
        program.step(batch_of(1))
        kept.save(program)
    with compiled(Case((2,), seed=3)) as (program, _):
        kept.load_newest(program)
        assert_same(everything(program), saved)


def test_parts_of_a_run_that_was_ended_while_it_wrote_are_cleared(tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path)
    with compiled(Case()) as (program, _):
        kept.save(program)
        for number in range(3):
            (tmp_path / f".step-0000000{number}.x{number}.partial").mkdir()
        program.step(batch_of(0))
        kept.save(program)
    assert names(tmp_path) == [0, 1]


def test_what_does_not_fit_is_no_damage(tmp_path: Path) -> None:
    """The newest is not passed over for what the user gives."""
    kept = weft.Checkpoints(tmp_path)
    with compiled(Case()) as (program, _):
        kept.save(program, {"a": 1})
        program.step(batch_of(0))
        kept.save(program)
        with pytest.raises(UserError, match="no extra 'a'"):
            kept.load_newest(program, {"a": program})


def test_one_that_is_still_written_is_the_newest(tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path, wait=False)
    with compiled(Case((2,))) as (program, _):
        for step in range(2):
            program.step(batch_of(step))
            kept.save(program)
        program.step(batch_of(2))
        kept.load_newest(program)
        assert program.steps == 2


@pytest.mark.parametrize(
    "entries", [{"every": 0}, {"every": 1.5}, {"keep": 0}, {"keep": True}, {"path": None}]
)
def test_wrong_arguments(entries: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="weft.Checkpoints: "):
        weft.Checkpoints(**{"path": "x", **entries})


def test_an_extra_of_the_user_s_stays_apart_from_the_score(tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path)
    with compiled(Case()) as (program, _):
        for score in (None, 2.0):
            with pytest.raises(
                UserError, match="the score .* extras as 'score'; give yours another"
            ):
                kept.save(program, {"score": 1.0}, score=score)
        assert names(tmp_path) == []
        kept.save(program, {"scores": 1.0}, score=2.0)
        assert kept.load_newest(program) == {"scores": 1.0, "score": 2.0}


@pytest.mark.parametrize("extra", [[], {"score": 10**400}, {"score": True}, {"score": "1"}])
def test_scores_that_are_none_count_for_none(extra: Any, tmp_path: Path) -> None:
    kept = weft.Checkpoints(tmp_path, keep=1)
    with compiled(Case()) as (program, _):
        place = kept.save(program)
        content = json.loads((place / "weft.json").read_text())
        content["about"]["extra"] = extra
        (place / "weft.json").write_text(json.dumps(content))
        program.step(batch_of(0))
        kept.save(program, score=1.0)
    assert names(tmp_path) == [1]


def test_a_run_that_went_back_keeps_what_it_writes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = weft.Checkpoints(tmp_path, every=1, keep=2)
    with compiled(Case((2,))) as (program, _):
        for step in range(6):
            program.step(batch_of(step))
            kept.save(program)
    with compiled(Case((2,))) as (program, _), caplog.at_level(logging.WARNING):
        for step in range(3):
            program.step(batch_of(step))
            assert kept.save(program).exists()
    assert names(tmp_path) == [2, 3, 5, 6]
    assert "later steps than 3, up to step-00000006" in caplog.text


@pytest.mark.one_process("rank 0 alone finds and names it")
@pytest.mark.parametrize("make", [Path.mkdir, Path.touch])
def test_what_was_never_a_checkpoint_is_named_and_the_one_before_taken(
    make: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = weft.Checkpoints(tmp_path, every=1)
    with compiled(Case((2,))) as (program, _), caplog.at_level(logging.WARNING):
        kept.save(program, {"number": 1})
        make(tmp_path / "step-00000009")
        assert kept.load_newest(program) == {"number": 1}
    assert "step-00000009 is not a checkpoint" in caplog.text


def test_an_element_of_any_stride_is_saved(tmp_path: Path) -> None:
    """One counts as contiguous whatever its stride is."""
    single = torch.tensor(2.0).expand(1)
    with compiled(Case()) as (program, _):
        program.save(tmp_path / "saved", {"single": single})
        assert torch.equal(program.load(tmp_path / "saved")["single"], single)


@pytest.mark.parametrize("wait", [True, False])
def test_what_stands_in_the_place_of_a_checkpoint_and_is_none_ends_no_run(
    wait: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept = weft.Checkpoints(tmp_path / "run", every=1, keep=2, wait=wait)
    old, cut, foreign, linked = (tmp_path / f"run/step-0000000{step}" for step in (0, 2, 3, 4))
    elsewhere = tmp_path / "elsewhere"
    with compiled(Case()) as (program, _):
        program.step(batch_of(0))
        kept.save(program, {"number": 1})
        program.step(batch_of(1))
        kept.save(program, {"number": 2})
        program.wait_for_saved()
        (cut / "weft.json").unlink()  # as when taking it away was cut short
        for place in (old, foreign, elsewhere):
            place.mkdir()
            (place / "notes.txt").write_text("mine")
        (foreign / "model.safetensors").write_text("mine, too")
        linked.symlink_to(elsewhere)
    with compiled(Case()) as (program, _):
        assert kept.load_newest(program) == {"number": 1}
        for step in (1, 2, 3):
            program.step(batch_of(step))
            kept.save(program, {"number": step + 1})
        program.wait_for_saved()
    abouts = [json.loads((each / "weft.json").read_text())["about"] for each in kept.all()[-2:]]
    assert [each["steps"] for each in abouts] == [3, 4]
    aside = sorted(each.name for each in (tmp_path / "run").glob("*.aside-*"))
    assert aside == ["step-00000003.aside-1", "step-00000004.aside-1"]
    for name in aside:
        assert (tmp_path / "run" / name / "notes.txt").read_text() == "mine"
    for place in (old, elsewhere):
        assert (place / "notes.txt").read_text() == "mine"
    assert (
        "step-00000003 is not a checkpoint, but has the name of one: it was renamed to"
        in caplog.text
    )
