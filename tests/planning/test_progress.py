"""What compiling says of itself: phases in the log, a line on terminals only, and only where it takes long."""

from __future__ import annotations

import gc
import re
import threading
from functools import partial
from typing import Any

import pytest
import torch
from rich.live import Live
from torch import nn

import weft
from weft.planning import progress as module
from weft.planning.progress import DELAY, alone, passed_over, progress
from weft.units import Seconds

PHASES = [
    "capturing",
    "cutting into stages and micro-batches",
    "choosing layouts",
    "planning",
    "filling variables",
    "starting the ranks",
]


def compile_small(**options: Any) -> None:
    model = nn.Linear(4, 2)
    with weft.local_world(2):
        weft.compile(
            model,
            lambda model, batch: model(batch).sum(),
            torch.optim.SGD(model.parameters()),
            torch.ones(8, 4),
            placement=weft.placement("cpu", [0, 1]),
            **options,
        ).close()


def logged(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [re.sub(r" took [\d.]+ s$", "", record.getMessage()) for record in caplog.records]


def test_phases_are_logged_and_nothing_is_printed(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with caplog.at_level("INFO", "weft"):
        compile_small()
    assert logged(caplog) == PHASES
    assert capfd.readouterr() == ("", "")


def test_the_log_says_how_long_a_phase_took(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([100.0, 102.5, 102.5, 110.0])
    monkeypatch.setattr("weft.planning.progress.time.perf_counter", lambda: next(clock))
    with caplog.at_level("INFO", "weft"), progress(False) as begin:
        begin("one")
        begin("other")
    assert [record.getMessage() for record in caplog.records] == [
        "one took 2.5 s",
        "other took 7.5 s",
    ]


def test_a_search_is_a_phase(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO", "weft"):
        compile_small(strategy=weft.Auto(moves=1))
    assert logged(caplog)[-len(PHASES) - 1 :] == ["searching for a strategy", *PHASES]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set whenever the line was drawn; stderr is taken for a terminal."""
    monkeypatch.setattr(module, "is_terminal", lambda: True)
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    found, refresh = threading.Event(), Live.refresh

    def refreshed(live: Live) -> None:
        refresh(live)
        found.set()

    monkeypatch.setattr(Live, "refresh", refreshed)
    return found


def test_a_terminal_shows_the_phase_and_its_seconds(
    drawn: threading.Event,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(module, "_REDRAWN", 0.001)
    threads = threading.active_count()
    with progress(first=True, delay=Seconds(0)) as begin:
        for name in PHASES[:2]:
            begin(name)
            drawn.clear()
            assert drawn.wait(60)  # a drawing that has begun before may be the other's
            drawn.clear()
            assert drawn.wait(60)
    assert threading.active_count() == threads
    shown = capsys.readouterr().err
    for name in PHASES[:2]:
        assert f"weft: {name} … 0 s" in shown
    assert shown.rpartition(PHASES[1])[2].count("\x1b[2K") >= 1, "the line is gone at the end"


def test_other_ranks_show_nothing(
    capsys: pytest.CaptureFixture[str], drawn: threading.Event
) -> None:
    threads = threading.active_count()
    with progress(first=False, delay=Seconds(0)) as begin:
        begin("capturing")
        assert threading.active_count() == threads
    assert not drawn.is_set()
    assert capsys.readouterr().err == ""


def test_nothing_is_drawn_beside_another_display(
    capsys: pytest.CaptureFixture[str], drawn: threading.Event
) -> None:
    with alone(), module._line(Seconds(0)) as line:
        line._thread.join(10)
        assert not line._thread.is_alive()
    assert not drawn.is_set()
    assert capsys.readouterr().err == ""


def test_what_is_soon_over_shows_nothing(
    capsys: pytest.CaptureFixture[str], drawn: threading.Event
) -> None:
    assert DELAY >= 1
    threads = threading.active_count()
    with progress(first=True, delay=Seconds(600)) as begin:
        begin("capturing")
        assert threading.active_count() == threads + 1
    assert threading.active_count() == threads
    assert not drawn.is_set()
    assert capsys.readouterr().err == ""


def test_the_line_is_gone_after_an_error(
    drawn: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = threading.active_count()

    def fail() -> None:
        with progress(first=True, delay=Seconds(0)) as begin:
            begin("capturing")
            assert drawn.wait(60)
            raise ValueError("refused")

    with pytest.raises(ValueError, match="refused"):
        fail()
    assert threading.active_count() == threads


def test_the_collector_passes_over_what_was_there(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    for name in ("freeze", "unfreeze"):
        monkeypatch.setattr(gc, name, partial(calls.append, name))
    monkeypatch.setattr(gc, "get_freeze_count", lambda: len(calls) % 2)
    with passed_over():
        with passed_over():
            pass
        assert calls == ["freeze"]
    assert calls == ["freeze", "unfreeze"]
