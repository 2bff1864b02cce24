"""With which exit code a rank ends, in this process: what ends it is caught where it would."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.cli import worker
from weft.cli.failure import NOTES, OWN, read_notes
from weft.runtime.world.launch import LAUNCHER, MEETING


class LeftError(BaseException):
    """Stands in for the end of the process."""


@pytest.fixture
def ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], int]:
    """The exit code of a rank that runs a text; its notes lie in the test's folder."""
    codes: list[int] = []
    at_end: list[Callable[[], object]] = []

    def leave(code: int) -> None:
        codes.append(code)
        raise LeftError

    def run(text: str) -> int:
        codes.clear()
        script = tmp_path / "script.py"
        script.write_text(text)
        monkeypatch.setattr(sys, "argv", ["worker", str(script)])
        try:
            worker.main()
            at_end[-1]()
        except (SystemExit, OSError):
            with pytest.raises(LeftError):
                at_end[-1]()
        except LeftError:
            pass
        return codes[0]

    monkeypatch.setenv(NOTES, str(tmp_path))
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(worker, "_end_with_launcher", lambda: None)
    monkeypatch.setattr(worker, "dump_stacks_on_signal", lambda *_: None)
    monkeypatch.setattr("weft.cli.worker.faulthandler.enable", lambda: None)
    monkeypatch.setattr("weft.cli.worker.atexit.register", at_end.append)
    monkeypatch.setattr("weft.cli.worker.os._exit", leave)
    return run


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("", 0),
        ("raise SystemExit", 0),
        ("raise SystemExit(0)", 0),
        ("raise SystemExit(True)", 1),
        ("raise SystemExit('no')", 1),
        ("raise SystemExit(7)", 7),
        ("raise SystemExit(-1)", 255),
        ("raise SystemExit(256)", 1),
        ("raise SystemExit(2**40)", 1),
        ("raise KeyboardInterrupt", 130),
        ("raise ValueError", 1),
        ("import asyncio\nraise asyncio.CancelledError", 1),
        ("raise GeneratorExit", 1),
    ],
)
def test_a_script_that_does_not_end_well_gives_no_0(
    ended: Callable[[str], int], text: str, code: int
) -> None:
    assert ended(text) == code


def test_what_is_no_exception_is_noted_too(ended: Callable[[str], int], tmp_path: Path) -> None:
    ended("import asyncio\nraise asyncio.CancelledError('late')")
    (found,) = read_notes(tmp_path)
    assert (found.rank, found.kind) == (3, OWN)
    assert found.title == f"{asyncio.CancelledError.__module__}.CancelledError: late"


def test_a_note_that_fails_does_not_make_the_end_a_good_one(
    ended: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(error: BaseException, script: str) -> None:
        raise MemoryError

    monkeypatch.setattr(worker, "write_note", full)
    assert ended("raise ValueError") == 1


def test_an_error_before_the_script_begins_is_no_good_end(
    ended: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise OSError

    monkeypatch.setattr(worker, "_end_with_launcher", fail)
    assert ended("") == 1


def test_a_rank_that_cannot_come_to_the_meeting_says_why(
    ended: Callable[[str], int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MEETING, str(tmp_path / "gone" / "meeting"))
    assert ended("") == 1
    assert "No such file" in read_notes(tmp_path)[0].title


def test_output_that_is_lost_is_no_good_end(
    ended: Callable[[str], int], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Full(io.StringIO):
        def flush(self) -> None:
            raise OSError("no space left")

    monkeypatch.setattr(sys, "stdout", Full())
    assert ended("") == 120
    assert ended("raise SystemExit(7)") == 7
    closed = io.StringIO()
    closed.close()
    monkeypatch.setattr(sys, "stdout", None)
    monkeypatch.setattr(sys, "stderr", closed)
    assert ended("") == 0


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel's death signal is Linux only")
@pytest.mark.parametrize("there", [True, False])
def test_a_rank_whose_launcher_is_gone_already_ends(
    there: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    ended: list[int] = []

    class Library:
        def prctl(self, *arguments: int) -> None:
            asked.append(arguments)

    monkeypatch.setattr("weft.cli.worker.ctypes.CDLL", lambda _: Library())
    monkeypatch.setattr("weft.cli.worker.os._exit", ended.append)
    monkeypatch.setenv(LAUNCHER, str(os.getppid() if there else os.getpid()))
    worker._end_with_launcher()
    assert asked == [(worker.PR_SET_PDEATHSIG, signal.SIGKILL)]
    assert ended == ([] if there else [1])
