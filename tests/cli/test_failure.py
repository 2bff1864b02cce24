"""Which rank is named as the one that failed first."""

from __future__ import annotations

import json
import traceback
from pathlib import Path

import pytest

from weft.cli.failure import NOTES, Note, describe, format_error, read_notes, write_note
from weft.errors import RankFailure
from weft.runtime.world.launch import Exit


def note(rank: int, nanoseconds: int, echo: bool = False) -> Note:
    return Note(rank, nanoseconds, f"ValueError: {rank}", f"Traceback of {rank}", echo)


def test_the_earliest_note_wins() -> None:
    exits = [Exit(0, 100, 1), Exit(1, 101, 1)]
    assert describe(exits, [note(0, 20), note(1, 10)]).startswith("rank 1 failed: ValueError: 1")


def test_a_rank_that_blames_its_peer_is_not_the_first() -> None:
    exits = [Exit(0, 100, 1), Exit(1, 101, 1)]
    assert describe(exits, [note(0, 10, echo=True), note(1, 20)]).startswith("rank 1 failed")


def test_a_note_counts_although_the_agent_saw_only_its_peer() -> None:
    assert describe([Exit(0, 100, 1)], [note(0, 20), note(1, 10)]).startswith("rank 1 failed")


def test_a_killed_rank_comes_before_the_peers_that_raise() -> None:
    text = describe([Exit(0, 100, 1), Exit(1, 101, -9)], [note(0, 10)])
    assert text.startswith("rank 1 (process 101) was ended by signal 9 (SIGKILL)")


def test_an_abort_is_an_echo() -> None:
    assert describe([Exit(1, 101, -6)], [note(0, 10)]).startswith("rank 0 failed")


def test_a_crash_after_the_note_does_not_hide_the_note() -> None:
    assert describe([Exit(1, 101, -11)], [note(1, 10)]).startswith("rank 1 failed")


def test_exit_codes_and_unknown_signals_are_told() -> None:
    assert "ended with exit code 3" in describe([Exit(1, 101, 3)], [])
    assert "signal 99 (unknown)" in describe([Exit(1, 101, -99)], [])


def test_a_note_is_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    write_note(RankFailure("rank 1 is gone"), "script.py")
    (found,) = read_notes(tmp_path)
    assert (found.rank, found.echo) == (3, True)
    assert found.title == "weft.errors.RankFailure: rank 1 is gone"
    assert json.loads((tmp_path / "3.json").read_text())["text"] == found.text


def test_without_a_launcher_the_traceback_is_printed(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(NOTES, raising=False)
    write_note(ValueError("alone"), "script.py")
    assert "ValueError: alone" in capfd.readouterr().err


def test_a_traceback_begins_at_the_script() -> None:
    code = compile("def f():\n    raise ValueError('deep')\nf()\n", "script.py", "exec")
    with pytest.raises(ValueError, match="deep") as caught:
        exec(code, {})
    lines = format_error(caught.value, "script.py").splitlines()
    assert lines[1].strip() == 'File "script.py", line 3, in <module>'


def test_a_syntax_error_is_told_without_frames() -> None:
    with pytest.raises(SyntaxError) as caught:
        compile("x = = 1", "script.py", "exec")
    text = format_error(caught.value, "script.py")
    assert "Traceback" not in text
    assert text == "".join(traceback.format_exception_only(caught.value))
