"""Goodput of a run with failures: when ranks die, and what is read off the times of steps."""

from __future__ import annotations

import pytest

from benchmarks.goodput.__main__ import Step, _deaths, _gaps, _held, _restart
from weft.units import Seconds


@pytest.mark.parametrize("every", [1, 4, 7])
def test_a_start_lives_for_as_many_steps_as_are_asked_for_in_the_mean(every: int) -> None:
    steps, interval, deaths = _deaths(every, 60, 7)
    begun = [0, *((death - 1) // every * every for death in deaths)]
    lives = [death - start for death, start in zip(deaths, begun, strict=False)]
    assert interval == every
    assert abs(sum(lives) / len(lives) - 60) <= 0.5
    assert steps == begun[-1] + 60
    # At all distances from a checkpoint, where they are few.
    assert len(set(lives)) == min(every, 7)


def _run() -> list[Step]:
    """Steps of 1 s, of which every second one is held for 0.2 s; after the sixth, 10 s until step 5 is made again."""
    first = [Step(n, n + 0.2 * (n // 2), 0) for n in range(1, 7)]
    again = first[-1].time + 10.0
    return [*first, *(Step(n, again + (n - 5) + 0.2 * ((n - 4) // 2), 1) for n in range(5, 65))]


def test_times_of_steps_are_taken_within_a_start() -> None:
    gaps = _gaps(_run(), warm=1)
    assert len(gaps) == 5 + 59
    assert set(map(round, gaps)) == {1}


def test_a_checkpoint_holds_what_steps_take_longer_in_the_mean() -> None:
    assert _held(_run(), Seconds(1.0), 2) == pytest.approx(0.2, abs=0.02)


def test_a_restart_lasts_from_the_last_step_to_the_first_one_anew() -> None:
    assert _restart(_run(), Seconds(1.0)) == pytest.approx(9.0)
