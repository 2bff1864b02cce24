"""Signals that tell this process to end, raised here."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator

import pytest

from weft.runtime.world.launch import Interrupts

ALL = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)


@pytest.fixture(autouse=True)
def _harmless() -> Iterator[None]:
    """A signal that nobody takes fails a test, and ends nothing."""
    before = {number: signal.signal(number, _missed) for number in ALL}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def _missed(number: int, _frame: object) -> None:
    raise AssertionError(f"nobody has taken {number}")


@pytest.mark.parametrize("number", ALL)
def test_the_first_signal_is_told_once_and_no_other_disturbs(number: signal.Signals) -> None:
    told: list[str] = []
    with Interrupts() as interrupts:
        with (
            interrupts.told_to(lambda: told.append("outer")),
            interrupts.told_to(lambda: told.append("inner")),
        ):
            signal.raise_signal(number)
            assert interrupts.heard
            assert told == ["inner"]
            for other in ALL:
                signal.raise_signal(other)
        assert told == ["inner"]
    assert signal.getsignal(number) is _missed


def test_each_further_ctrl_c_hurries() -> None:
    told: list[str] = []
    with Interrupts() as interrupts:
        with interrupts.told_to(lambda: told.append("first"), lambda: told.append("again")):
            for number in (signal.SIGTERM, signal.SIGTERM, signal.SIGINT, signal.SIGINT):
                signal.raise_signal(number)
        signal.raise_signal(signal.SIGINT)
    assert told == ["first", "again", "again"]


def test_one_that_came_where_nothing_may_be_disturbed_is_told_later() -> None:
    told: list[str] = []
    with Interrupts() as interrupts:
        signal.raise_signal(signal.SIGTERM)
        with interrupts.told_to(lambda: told.append("later")):
            assert told == ["later"]
        with pytest.raises(KeyboardInterrupt), interrupts.raised():
            raise AssertionError("the body has begun")


def test_a_wait_is_interrupted_where_that_is_asked_for() -> None:
    with Interrupts() as interrupts:
        with pytest.raises(KeyboardInterrupt), interrupts.raised():
            signal.raise_signal(signal.SIGHUP)
        signal.raise_signal(signal.SIGHUP)


def test_what_was_ignored_stays_so() -> None:
    """As SIGHUP under nohup, SIGINT and SIGQUIT of what a script has started with &."""
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Interrupts() as interrupts:
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
        signal.raise_signal(signal.SIGHUP)
        assert not interrupts.heard
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_another_thread_hears_none() -> None:
    def enter() -> None:
        with Interrupts():
            found.extend(signal.getsignal(number) for number in ALL)

    found: list[object] = []
    thread = threading.Thread(target=enter)
    thread.start()
    thread.join(10)
    assert found == [_missed] * len(ALL)
