"""At which place a rank was, as its answer to a signal tells."""

from __future__ import annotations

import faulthandler
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.cli.failure import ASKS, dump_stacks_on_signal, read_stack_dumps


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """Where this process answers, as rank 3."""
    dump_stacks_on_signal(tmp_path, 3)
    yield tmp_path
    faulthandler.unregister(ASKS)


def test_the_users_innermost_line_is_told(folder: Path) -> None:
    line = ask.__code__.co_firstlineno + 2
    ask()
    assert read_stack_dumps(folder) == {3: f"{__file__}:{line}, in ask"}


def ask() -> None:
    """Ask this process, as the launcher would."""
    os.kill(os.getpid(), ASKS)


def test_a_line_within_python_s_library_is_not_the_users(folder: Path) -> None:
    class Asking(dict[str, str]):
        def __repr__(self) -> str:
            ask()
            return ""

    exec("import reprlib\nreprlib.Repr().repr(asking)", {"asking": Asking()})
    assert read_stack_dumps(folder)[3].endswith("in ask")


def test_it_is_the_main_thread_s_line(folder: Path) -> None:
    asked = threading.Event()

    def other() -> None:
        ask()
        asked.set()

    thread = threading.Thread(target=other)
    thread.start()
    assert asked.wait(20)
    thread.join(20)
    assert "test_it_is_the_main_thread_s_line" in read_stack_dumps(folder)[3]


def test_who_was_not_asked_tells_nothing(folder: Path) -> None:
    assert read_stack_dumps(folder) == {}


@pytest.mark.parametrize("text", ["", "x\n", "7\nThread 0x0000000000000007 (most recent call"])
def test_half_an_answer_is_none(text: str, tmp_path: Path) -> None:
    (tmp_path / "0.stacks").write_text(text)
    assert read_stack_dumps(tmp_path) == {}
