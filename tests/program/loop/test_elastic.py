"""`weft.elastic` where a stand-in for the launcher says who goes on; with real ranks: tests/cli/test_in_place.py."""

from __future__ import annotations

import random
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import weft
from weft.errors import NoAnswer, RankFailure, UserError
from weft.program.loop import elastic as module


class Leading:
    """Stands in for a `Follower`: goes on after errors that others have caused."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.renews = True

    def enter(self, stop: Callable[[str], object]) -> None:
        self.said.append("inside")

    def leave(self) -> None:
        self.said.append("outside")

    def goes_on(self, error: BaseException) -> bool:
        return isinstance(error, RankFailure)

    def renew(self, hindrance: str) -> bool:
        self.said.append(hindrance or "ready")
        return self.renews and not hindrance


@pytest.fixture
def leading(monkeypatch: pytest.MonkeyPatch) -> Leading:
    found = Leading()
    monkeypatch.setattr(module, "follower", lambda: found)
    monkeypatch.setattr(module, "lasting_worlds", list)
    return found


def test_without_a_launcher_the_function_is_called() -> None:
    assert weft.elastic(lambda: 3) == 3
    with pytest.raises(NoAnswer):
        weft.elastic(_raises(NoAnswer("gone")))


def _raises(error: Exception) -> Callable[[], None]:
    def work() -> None:
        raise error

    return work


def test_it_is_called_again_with_generators_as_they_were(leading: Leading) -> None:
    drawn: list[tuple[float, float, float]] = []

    def work() -> int:
        drawn.append((random.random(), np.random.rand(), float(torch.rand(()))))
        if len(drawn) < 3:
            raise NoAnswer("rank 1 is gone")
        return len(drawn)

    assert weft.elastic(work) == 3
    assert drawn == [drawn[0]] * 3
    assert leading.said == ["inside", "ready", "ready", "outside"]


def test_what_the_function_held_is_free(leading: Leading, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also what stands in frames of errors behind the error."""
    held: list[weakref.ref[torch.nn.Module]] = []
    left: list[bool] = []

    def lost() -> None:
        model = torch.nn.Linear(2, 2)
        held.append(weakref.ref(model))
        raise ConnectionError("a connection")

    def work() -> None:
        if not held:
            model = torch.nn.Linear(2, 2)
            held.append(weakref.ref(model))
            try:
                lost()
            except ConnectionError as error:
                raise NoAnswer("rank 1 is gone") from error

    monkeypatch.setattr(
        module, "end_old_world", lambda: left.extend(x() is not None for x in held) or ""
    )
    weft.elastic(work)
    assert left == [False, False]


def test_an_error_of_its_own_passes(leading: Leading) -> None:
    with pytest.raises(ValueError, match="mine"):
        weft.elastic(_raises(ValueError("mine")))
    with pytest.raises(SystemExit):
        weft.elastic(_raises(SystemExit(3)))  # type: ignore[arg-type]
    assert leading.said == ["inside", "outside"] * 2


def test_where_the_launcher_starts_all_again_the_rank_fails(leading: Leading) -> None:
    leading.renews = False
    with pytest.raises(RankFailure, match=r"start again: NoAnswer: rank 1 is gone"):
        weft.elastic(_raises(NoAnswer("rank 1 is gone")))
    assert leading.said == ["inside", "ready", "outside"]


def test_a_thread_that_still_works_is_in_the_way(
    leading: Leading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_PATIENCE", 0.05)
    end = threading.Event()
    thread = threading.Thread(target=end.wait, name="weft snapshot", daemon=True)
    thread.start()
    with pytest.raises(RankFailure):
        weft.elastic(_raises(NoAnswer("rank 1 is gone")))
    end.set()
    thread.join(10)
    assert leading.said[1] == "the thread 'weft snapshot' still works"


def test_programs_that_nobody_closed_are_closed(leading: Leading) -> None:
    made: list[weft.Program] = []

    def work() -> None:
        if made:
            return
        model, x = torch.nn.Linear(2, 2), torch.ones(2, 2)
        made.append(
            weft.compile(
                model, lambda m, x: m(x).sum(), None, x, placement=weft.placement("cpu", [0])
            )
        )
        raise NoAnswer("rank 1 is gone")

    weft.elastic(work)
    with pytest.raises(UserError, match="closed"):
        made[0].step(torch.ones(2, 2))
    assert not [each for each in threading.enumerate() if each.name.startswith("weft ")]


def test_devices_that_are_not_cpus_are_in_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "lasting_worlds", lambda: [SimpleNamespace(device_type="cuda")])
    assert "not CPUs" in module.end_old_world()


def test_ranks_that_have_met_before_are_refused(
    leading: Leading, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "lasting_worlds", lambda: [object()])
    with pytest.raises(UserError, match="the ranks have met before it was called"):
        weft.elastic(lambda: None)
    with pytest.raises(UserError, match="takes a function without arguments, found 3"):
        weft.elastic(3)  # type: ignore[arg-type]
    assert leading.said == []
