"""Values that no argument of weft's functions takes, one at a time: a `UserError`, soon, or it works."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import pytest

import weft
from api_calls import ApiCall, api_calls, wrong_values
from weft.errors import UserError

# What is no function, is made by weft only, or comes from files (tests/search/record).
MADE = {"Program", "Simulation", "SearchRecord", "SearchResult", "GlobalTensor"}
PLAIN = {"__version__", "errors", "broadcast", "logs"}
# It takes a program that trains, and steps it (tests/program/loop).
STEPS = {"fit"}
# A search of so many moves lasts as long as it was asked to; what is called is the user's own.
AS_ASKED = {("search", "moves"), ("search", "told")}
# A local world has no tensor that these take.
OF_PROCESSES = {"from_dtensor", "to_dtensor"}
# Seconds that a refusal may take on a busy machine.
SOON = 10.0

CALLS = {make().name: make for make in api_calls()}


def test_every_public_name_is_called() -> None:
    assert set(weft.__all__) - CALLS.keys() == MADE | PLAIN | STEPS


@pytest.mark.timeout(120)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CALLS)
def test_a_wrong_argument_is_a_user_s_error(name: str) -> None:
    with weft.local_world(2):
        _try_all(name, CALLS[name])


def _try_all(name: str, make: Callable[[], ApiCall]) -> None:
    if name not in OF_PROCESSES:
        make().run()
    for argument in make().arguments:
        if (name, argument) in AS_ASKED:
            continue
        for index in range(len(wrong_values())):
            started = time.monotonic()
            with suppress(UserError):  # all else fails the test
                make().run(**{argument: wrong_values()[index]})
            assert time.monotonic() - started < SOON, (argument, index)


@pytest.mark.parametrize("name", ["stages", "micro_batches"])
def test_absurd_numbers_are_refused_at_once(name: str) -> None:
    for number in (10**9, 10**30):
        with pytest.raises(UserError, match=rf"{name}= must be a whole number up to 65536"):
            weft.Strategy(**{name: number})  # type: ignore[arg-type]


def test_absurd_grids_and_worlds_are_refused_at_once() -> None:
    for ranks in (range(10**9), [range(10**9)]):
        with pytest.raises(UserError, match="at most 1048576 ranks and 32 axes"):
            weft.placement("cpu", ranks)
    deep: object = 0
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(UserError, match="at most 1048576 ranks and 32 axes"):
        weft.placement("cpu", deep)  # type: ignore[arg-type]
    for size in (10**9, 10**400):
        with pytest.raises(UserError, match="from 1 to 4096"), weft.local_world(size):
            pass
