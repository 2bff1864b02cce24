"""The bar of the loop: on the terminal of stderr, and nowhere else."""

from __future__ import annotations

import os
import pty
import sys
from pathlib import Path

import pytest

from weft.planning.progress import alone
from weft.program.loop.bar import ProgressBar
from weft.units import Seconds


def drawn(monkeypatch: pytest.MonkeyPatch, stdout: Path, shown: bool = True) -> str:
    """What the bar of two steps writes to a terminal that is stderr's; `stdout` is a file."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "200")
    far, near = pty.openpty()
    with os.fdopen(near, "w") as stderr, stdout.open("w") as file:
        monkeypatch.setattr(sys, "stderr", stderr)
        monkeypatch.setattr(sys, "stdout", file)
        with ProgressBar(shown, 2) as bar:
            bar.advance(1, 8, Seconds(0.0))
            sys.stdout.write("a line of the script\n")
            bar.show({"top[5]": 0.25, "[/x]": 1.0})
            bar.advance(2, 8, Seconds(0.0))
        stderr.write("end")
    found = b""
    while not found.endswith(b"end"):
        found += os.read(far, 100_000)
    os.close(far)
    return found.decode().removesuffix("end")


def test_it_is_drawn_on_stderr_and_what_is_printed_stays_on_stdout(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = drawn(monkeypatch, tmp_path / "log")
    assert "2/2" in text
    assert "top[5] 0.25, [/x] 1" in text
    assert "a line of the script" not in text
    assert (tmp_path / "log").read_text() == "a line of the script\n"


def test_nothing_is_drawn_unasked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert drawn(monkeypatch, tmp_path / "log", shown=False) == ""
    with alone():
        assert drawn(monkeypatch, tmp_path / "log") == ""
    assert (tmp_path / "log").read_text() == "a line of the script\n"


def test_nothing_is_written_to_a_file(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with ProgressBar(True, 1) as bar:
        bar.advance(1, 8, Seconds(0.0))
    assert capfd.readouterr() == ("", "")
