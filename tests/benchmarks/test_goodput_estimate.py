"""What failures leave of a run's speed, beside a run that is played through."""

from __future__ import annotations

import random

import pytest

from benchmarks.goodput.estimate import goodput
from weft.errors import UserError
from weft.units import Seconds


def played(step: float, failure: float, held: float, restart: float, every: int) -> float:
    """The share of time that went to steps that stayed, in a run with failures at random moments."""
    draw = random.Random(0)
    now = kept = 0.0
    done = saved = 0
    fails = draw.expovariate(1 / failure)
    while now < 3000 * failure:
        last = held if (done + 1) % every == 0 else 0.0
        if now + step + last > fails:
            now = fails + restart
            done = saved
            fails = now + draw.expovariate(1 / failure)
            continue
        now += step + last
        done += 1
        if last:
            saved = done
        kept = max(kept, done)
    return saved * step / now


@pytest.mark.parametrize("every", [1, 5, 20, 80])
def test_as_a_run_that_is_played(every: int) -> None:
    step, failure, held, restart = 1.0, 400.0, 0.5, 10.0
    found = goodput(
        Seconds(step), Seconds(failure), Seconds(held), Seconds(restart), Seconds(0), every
    )
    assert found.share == pytest.approx(played(step, failure, held, restart, every), rel=0.02)
    assert found.share + found.saving + found.again + found.restarting == pytest.approx(1)


def test_the_best_is_better_than_its_neighbours() -> None:
    numbers = [Seconds(each) for each in (1.0, 400.0, 0.5, 10.0)]
    best = goodput(*numbers)
    assert best.every == 20
    for every in (best.every // 2, best.every * 2):
        assert goodput(*numbers, every=every).share < best.share
    assert "with a checkpoint every 20 steps" in str(best)


def test_a_run_that_fails_before_it_has_saved() -> None:
    assert goodput(Seconds(1), Seconds(5), Seconds(1), Seconds(1), every=100).share == 0


@pytest.mark.parametrize(
    "wrong", [{"step": 0}, {"failure": -1}, {"held": True}, {"restart": "1"}, {"every": 0}]
)
def test_wrong_numbers(wrong: dict[str, object]) -> None:
    given = {"step": 1, "failure": 100, "held": 1, "restart": 1, **wrong}
    with pytest.raises(UserError, match=f"goodput: {next(iter(wrong))} takes"):
        goodput(**given)  # type: ignore[arg-type]
