"""Progress is drawn on the terminal of stderr alone, by one display at a time; what is printed goes where it went."""

from __future__ import annotations

import os
import pty
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from rich.live import Live

from weft.planning.progress import alone, display_options, is_terminal


@contextmanager
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """The far end of a terminal, which is that of stderr."""
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("FORCE_COLOR", raising=False)
    far, near = pty.openpty()
    with os.fdopen(near, "w") as stderr, monkeypatch.context() as patched:
        patched.setattr(sys, "stderr", stderr)
        yield far
    os.close(far)


def shown(screen: int) -> str:
    sys.stderr.flush()
    return os.read(screen, 100_000).decode()


def test_what_is_printed_beside_a_display_stays_in_its_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with terminal(monkeypatch) as screen, (tmp_path / "log").open("w") as stdout:
        assert is_terminal()
        monkeypatch.setattr(sys, "stdout", stdout)
        with Live("a line", auto_refresh=False, **display_options()) as live:
            sys.stdout.write("a loss\n")
            live.refresh()
        drawn = shown(screen)
    assert (tmp_path / "log").read_text() == "a loss\n"
    assert "a line" in drawn
    assert "a loss" not in drawn


def test_colors_in_a_file_are_no_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    with (tmp_path / "log").open("w") as stderr:
        monkeypatch.setattr(sys, "stderr", stderr)
        assert not is_terminal()
        monkeypatch.setattr(sys, "stderr", None)
        assert not is_terminal()


def test_one_display_at_a_time() -> None:
    with alone() as first, alone() as second:
        assert (first, second) == (True, False)
    with alone() as third:
        assert third
