"""A rank hears of losses over its line, at once and by another thread, and of the world in which it goes on."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from queue import SimpleQueue
from typing import NamedTuple

import pytest

from weft.runtime.world.in_place import follower as module
from weft.runtime.world.in_place.follower import Follower, follower, open_line
from weft.runtime.world.in_place.line import GO, LINE, RESTART_ALL, STOP, RankLine

pytestmark = pytest.mark.timeout(30)


class Both(NamedTuple):
    """A follower, its launcher, and what was called."""

    follower: Follower
    launcher: RankLine
    heard: Iterator[tuple[str, str]]
    stops: SimpleQueue[str]
    renewed: list[str]

    def hear(self) -> tuple[str, str]:
        return next(self.heard)


@pytest.fixture
def both(monkeypatch: pytest.MonkeyPatch) -> Iterator[Both]:
    """A rank inside of its work; `ValueError` is a failure of its own."""
    monkeypatch.setattr(module, "SOON_SECONDS", 0.05)
    monkeypatch.setattr(module, "ANSWER_SECONDS", 10.0)
    monkeypatch.setenv("RANK", "3")
    one, other = socket.socketpair()
    stops: SimpleQueue[str] = SimpleQueue()
    renewed: list[str] = []
    rank = Follower(
        RankLine(one),
        lambda error: (not isinstance(error, ValueError), str(error)),
        lambda: renewed.append(os.environ["RANK"]),
    )
    launcher = RankLine(other)
    rank.enter(stops.put)
    found = Both(rank, launcher, launcher.heard(), stops, renewed)
    assert found.hear() == ("inside", "")
    yield found
    launcher.close()
    threads = [each for each in threading.enumerate() if each.name == module.LISTENS]
    for thread in threads:
        thread.join(10)


def test_a_rank_goes_on_with_the_variables_of_the_new_world(both: Both) -> None:
    both.launcher.say(STOP, "rank 1 is gone")
    assert both.stops.get(timeout=10) == "rank 1 is gone"
    assert both.follower.goes_on(OSError("a connection"))
    both.launcher.say(GO, json.dumps({"RANK": "2"}))
    assert both.follower.renew("")
    assert both.hear() == ("ready", "")
    assert both.renewed == ["2"]
    # The next loss is another one, of which nothing was said yet.
    assert not both.follower._said.is_set()
    assert not both.follower.goes_on(ValueError("its own"))
    both.follower.leave()
    assert both.hear() == ("outside", "")


def test_all_waits_have_ended_before_the_rank_goes_on(both: Both) -> None:
    """Else it would begin those of the new world before the listening thread ends what it takes for the old one's."""
    told: SimpleQueue[bool] = SimpleQueue()
    both.follower.enter(lambda _: told.put(both.follower._said.is_set()))
    both.launcher.say(STOP, "rank 1 is gone")
    assert told.get(timeout=10) is False
    assert both.follower.goes_on(OSError("a connection"))


def test_a_failure_by_others_is_told_and_waits_for_the_launcher(both: Both) -> None:
    """And this rank's own waits end, so that others do not wait for it."""
    answers: list[bool] = []
    waits = threading.Thread(
        target=lambda: answers.append(both.follower.goes_on(OSError("no answer")))
    )
    waits.start()
    assert both.hear() == ("failed", "no answer")
    assert both.stops.get(timeout=10) == "no answer"
    both.launcher.say(STOP, "rank 1 is gone")
    waits.join(10)
    assert answers == [True]


@pytest.mark.parametrize("early", [True, False])
def test_where_all_start_again_the_rank_fails(both: Both, early: bool) -> None:
    if early:
        both.launcher.say(RESTART_ALL)
        assert not both.follower.goes_on(OSError("no answer"))
        return
    both.launcher.say(STOP, "rank 1 is gone")
    assert both.follower.goes_on(OSError("no answer"))
    both.launcher.say(RESTART_ALL)
    assert not both.follower.renew("a thread hangs")
    assert both.renewed == []


def test_a_failure_of_its_own_is_not_waited_with(both: Both) -> None:
    assert not both.follower.goes_on(ValueError("its own"))
    both.follower.leave()
    assert both.hear() == ("outside", "")  # nothing was said before


def test_a_hindrance_is_told(both: Both) -> None:
    both.launcher.say(RESTART_ALL)
    assert not both.follower.renew("a thread hangs")
    assert both.hear() == ("cannot", "a thread hangs")


def test_a_forked_process_has_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = socket.socketpair()
    monkeypatch.setattr(module, "_follower", [])
    monkeypatch.setenv(LINE, str(one.detach()))
    open_line(lambda _: (True, ""), lambda: None)
    assert LINE not in os.environ
    assert follower() is not None
    module._follower[0]._line.close()
    monkeypatch.setattr("weft.runtime.world.in_place.follower.os.getpid", lambda: -1)
    assert follower() is None
    other.close()


def test_without_a_launcher_there_is_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_follower", [])
    monkeypatch.delenv(LINE, raising=False)
    open_line(lambda _: (True, ""), lambda: None)
    assert follower() is None
