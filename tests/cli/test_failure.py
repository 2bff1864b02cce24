"""Which rank is named as the one that failed first."""

from __future__ import annotations

import json
import time
import traceback
from dataclasses import asdict
from pathlib import Path

import pytest

from weft.cli.failure import (
    NOTES,
    OWN,
    TOLD,
    WAITED,
    Note,
    absent,
    describe,
    format_error,
    own_failure,
    read_notes,
    write_note,
)
from weft.errors import NoAnswer, RankFailure
from weft.runtime.failures.failure_store import PeerFailure
from weft.runtime.world.launch import Exit


def note(rank: int, nanoseconds: int, kind: str = OWN) -> Note:
    return Note(rank, nanoseconds, f"ValueError: {rank}", f"Traceback of {rank}", kind)


def test_the_earliest_note_wins() -> None:
    exits = [Exit(0, 100, 1), Exit(1, 101, 1)]
    assert describe(exits, [note(0, 20), note(1, 10)]).startswith("rank 1 failed: ValueError: 1")


@pytest.mark.parametrize("kind", [WAITED, TOLD])
def test_a_rank_that_waited_for_another_is_not_the_first(kind: str) -> None:
    exits = [Exit(0, 100, 1), Exit(1, 101, 1)]
    assert describe(exits, [note(0, 10, kind), note(1, 20)]).startswith("rank 1 failed")


def test_a_note_counts_although_the_agent_saw_only_its_peer() -> None:
    assert describe([Exit(0, 100, 1)], [note(0, 20), note(1, 10)]).startswith("rank 1 failed")


def test_notes_are_read_as_they_were_written(tmp_path: Path) -> None:
    for number, text in enumerate((str(note(3, 7, TOLD)), '{"rank": 1}', "[")):
        (tmp_path / f"{number}.json").write_text(text)
    assert read_notes(tmp_path) == (note(3, 7, TOLD),)


SECOND = 10**9


@pytest.mark.parametrize("code", [-9, -11])
@pytest.mark.parametrize("kind", [OWN, WAITED, TOLD])
def test_a_killed_rank_comes_before_the_peers_that_raise_then(code: int, kind: str) -> None:
    text = describe([Exit(0, 100, 1), Exit(1, 101, code, 20)], [note(0, 30, kind)])
    assert text.startswith(f"rank 1 (process 101) was ended by signal {-code}")
    assert "rank 0" not in text


def test_a_crash_that_is_seen_a_little_late_still_comes_first() -> None:
    exits = [Exit(0, 100, 1, SECOND), Exit(1, 101, -9, SECOND + SECOND // 10)]
    text = describe(exits, [note(0, SECOND)])
    assert text.startswith("rank 1 (process 101) was ended by signal 9 (SIGKILL)")
    assert "0.1 s before that was seen, rank 0 failed: ValueError: 0\n\nTraceback of 0" in text


def test_a_crash_long_after_a_failure_does_not_hide_it() -> None:
    exits = [Exit(0, 100, 1, SECOND), Exit(1, 101, -11, 2 * SECOND)]
    text = describe(exits, [note(0, SECOND), note(2, SECOND + 1)])
    assert text.startswith("rank 0 failed: ValueError: 0\n\nTraceback of 0")
    assert "1.0 s later, rank 1 (process 101) was ended by signal 11 (SIGSEGV)" in text


def test_a_failure_is_known_before_it_is_known_who_did_not_answer() -> None:
    assert own_failure([Exit(0, 100, 1)], [note(0, 10, WAITED)]) is None
    assert own_failure([Exit(0, 100, 1)], [note(0, 10)]) == describe([], [note(0, 10)])
    assert absent([Exit(0, 100, 1)], []) == []
    assert len(absent([Exit(0, 100, 1)], [3])) == 1


def test_what_the_launcher_killed_is_not_the_first() -> None:
    exits = [Exit(0, 100, 1, 10), Exit(1, 101, -9, 20, asked=True)]
    assert describe(exits, [note(0, 10)]).startswith("rank 0 failed")


@pytest.mark.parametrize("code", [3, -6, -15])
def test_a_silent_end_counts_when_it_was_the_first(code: int) -> None:
    exits = [Exit(1, 101, code, 10), Exit(0, 100, 1, 30)]
    assert describe(exits, [note(0, 20)]).startswith("rank 1 (process 101)")
    assert describe(exits, [note(0, 5)]).startswith("rank 0 failed")


def test_the_first_of_two_silent_ends_is_named() -> None:
    exits = [Exit(1, 101, 3, 10), Exit(0, 100, -6, 20)]
    assert describe(exits, []).startswith("rank 1 (process 101) ended with exit code 3")


def test_a_rank_that_ended_well_too_early_is_named_with_who_waited() -> None:
    exits = [Exit(1, 101, 0, 10), Exit(0, 100, 1, 20)]
    text = describe(exits, [note(0, 20, WAITED)])
    assert text.startswith("rank 1 (process 101) ended with exit code 0 while others still waited")
    assert "rank 0 failed: ValueError: 0" in text


def test_a_rank_of_another_node_that_ended_well_too_early_is_named() -> None:
    text = describe([Exit(0, 100, 1, 20)], [note(0, 20, WAITED)], [3])
    assert text.startswith("rank 3 (on another node) ended with exit code 0")


def test_who_ends_well_is_not_blamed_for_another_s_error() -> None:
    exits = [Exit(1, 101, 0, 10), Exit(0, 100, 1, 20)]
    assert describe(exits, [note(0, 20)]).startswith("rank 0 failed")


def test_a_rank_that_did_not_answer_is_named() -> None:
    hung = [Exit(0, 100, 1, 20), Exit(2, 102, 1, 21), Exit(1, 101, -15, 30, asked=True)]
    notes = [note(2, 21, TOLD), note(0, 22, WAITED)]
    text = describe(hung, notes)
    assert text.startswith("rank 1 (process 101) did not answer the others: it still ran")
    assert "rank 0 failed" in text
    stopped = [hung[0], Exit(1, 101, -9, 30, asked=True, state="T")]
    assert "stopped by a signal (SIGSTOP)" in describe(stopped, notes)


def test_the_place_of_a_rank_that_did_not_answer_is_told() -> None:
    exits = [Exit(0, 100, 1, 20), Exit(1, 101, -15, 30, asked=True)]
    text = describe(exits, [note(0, 22, WAITED)], places={1: "script.py:7, in train"})
    assert "did not wait for them; it was at script.py:7, in train." in text


def test_a_list_of_ranks_that_did_not_answer_is_short() -> None:
    exits = [Exit(0, 100, 1, 20), *(Exit(rank, 0, -15, 30, asked=True) for rank in range(1, 9))]
    assert "; and 5 more ranks." in describe(exits, [note(0, 20, WAITED)])


def test_a_crash_after_the_note_does_not_hide_the_note() -> None:
    assert describe([Exit(1, 101, -11)], [note(1, 10)]).startswith("rank 1 failed")


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ValueError("x"), OWN),
        (RankFailure("rank 0: Compute 1 failed: RuntimeError: no memory"), OWN),
        (RuntimeError("x"), OWN),
        (NoAnswer("rank 1"), WAITED),
        (RuntimeError("[gloo/transport/tcp/pair.cc:534] Connection closed by peer"), WAITED),
        (RuntimeError("Wait timeout"), WAITED),
        (RuntimeError("Timeout waiting for key: default_pg/0/cpu after 4000 ms"), WAITED),
        (RuntimeError("[1] is setting up NCCL communicator\nConnection Reset By Peer"), WAITED),
        (RuntimeError("NCCL error in: N.cpp:77, remote process exited or there was a"), WAITED),
        (RuntimeError("ncclInternalError.\nLast error:\nConnection closed by remote peer"), WAITED),
        (RuntimeError("NCCL communicator was aborted on rank 1."), WAITED),
        (RuntimeError("NCCL error: unhandled cuda error"), OWN),
        (PeerFailure("rank 1 failed"), TOLD),
    ],
)
def test_what_a_failure_is_to_the_job(
    error: Exception, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    write_note(error, "script.py")
    assert read_notes(tmp_path)[0].kind == kind


def test_exit_codes_and_unknown_signals_are_told() -> None:
    assert "ended with exit code 3" in describe([Exit(1, 101, 3)], [])
    assert "signal 99 (unknown)" in describe([Exit(1, 101, -99)], [])


def test_a_note_is_written_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    write_note(NoAnswer("rank 1 is gone"), "script.py")
    (found,) = read_notes(tmp_path)
    assert (found.rank, found.kind) == (3, WAITED)
    assert found.title == "weft.errors.NoAnswer: rank 1 is gone"
    assert json.loads((tmp_path / "3.json").read_text())["text"] == found.text


def test_a_note_carries_the_time_of_a_clock_that_is_never_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    before = time.monotonic_ns()
    write_note(ValueError("x"), "script.py")
    assert before <= read_notes(tmp_path)[0].nanoseconds <= time.monotonic_ns()


@pytest.mark.parametrize("text", ["", '{"rank": 1', "[]", '{"rank": 1}', "7"])
def test_a_note_that_cannot_be_read_hides_no_other(text: str, tmp_path: Path) -> None:
    (tmp_path / "1.json").write_text(text)
    (tmp_path / "3.json").write_text(json.dumps(asdict(note(3, 10))))
    (tmp_path / "4.json").mkdir()
    assert read_notes(tmp_path) == (note(3, 10),)


def test_a_note_is_there_only_when_it_is_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seen at the moment when it has been written, and has not been put in its place."""
    monkeypatch.setenv(NOTES, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    seen = []
    replace = Path.replace

    def look(path: Path, target: Path) -> Path:
        seen.append(read_notes(tmp_path))
        return replace(path, target)

    monkeypatch.setattr(Path, "replace", look)
    write_note(ValueError("x"), "script.py")
    assert seen == [()]
    assert len(read_notes(tmp_path)) == 1


def test_where_a_note_cannot_be_written_the_traceback_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(NOTES, str(tmp_path / "gone"))
    monkeypatch.setenv("RANK", "3")
    write_note(ValueError("no place \udcff"), "script.py")
    told = capfd.readouterr().err
    assert "ValueError: no place \\udcff\n" in told
    assert "cannot write the note" in told


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
