"""Goodput: the share of an unbroken run's speed that is left when ranks fail now and then."""

from __future__ import annotations

from dataclasses import dataclass
from math import sqrt
from typing import final

from weft.errors import UserError
from weft.units import Seconds


@final
@dataclass(frozen=True)
class Goodput:
    """A run with checkpoints and failures.

    Attributes:
        every: steps between checkpoints.
        share: of the steps a second of a run without either, between 0 and 1.
        saving, again, restarting: shares of the time that go to holding steps for checkpoints, to making steps again,
            and to starting again.
    """

    every: int
    share: float
    saving: float
    again: float
    restarting: float

    def __str__(self) -> str:
        return (
            f"{self.share:.1%} of unbroken speed with a checkpoint every {self.every} steps: saving {self.saving:.1%}, "
            f"steps made again {self.again:.1%}, restarts {self.restarting:.1%}"
        )


def goodput(
    step: Seconds,
    failure: Seconds,
    held: Seconds,
    restart: Seconds,
    writing: Seconds | None = None,
    every: int | None = None,
) -> Goodput:
    """The speed that is left of a run, and how often to save.

    A failure comes at a moment that is independent of checkpoints: on average half of the steps between two of them are
    made again, and those that ran while the last one was being written. How often to save is what loses least:
    sqrt(2 · held · failure), a first-order optimum (Young 1974, "A first order approximation to the optimum checkpoint
    interval").

    Args:
        step: seconds of a step, as `Simulation.seconds` has it or as measured.
        failure: seconds of run between two failures of any rank.
        held: seconds for which steps wait for a checkpoint.
        restart: seconds from a failure to the first new step: it is told, ranks start, compile and load.
        writing: seconds until a checkpoint is there, from its beginning; by default as long as steps are held.
        every: steps between checkpoints; by default what loses least.

    Raises:
        UserError: a number that cannot be.
    """
    given = {"step": step, "failure": failure, "held": held, "restart": restart}
    for name, seconds in given.items():
        least = 0.0 if name in ("held", "restart") else 1e-12
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds < least:
            raise UserError(f"goodput: {name} takes seconds, found {seconds!r}")
    if every is not None and (isinstance(every, bool) or not isinstance(every, int) or every < 1):
        raise UserError(f"goodput: every takes a number of steps from 1, found {every!r}")
    every = every or max(1, round(sqrt(2 * held * failure) / step))
    late = held if writing is None else writing
    # Seconds for a failure's worth of run: `failure` seconds of steps and saves, then what it costs.
    steps = failure / (step + held / every)
    lost = min(every * step / 2 + late, failure)
    whole = failure + restart
    useful = max(0.0, steps * step - lost)
    return Goodput(
        every, useful / whole, steps * held / every / whole, lost / whole, restart / whole
    )
