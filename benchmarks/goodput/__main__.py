"""A run in which a rank dies every so many steps, beside what `goodput` predicts: `python -m benchmarks.goodput`.

Three runs of a GPT on two ranks give what a prediction takes: steps alone; steps with checkpoints beside them, for what
a step waits for; one death, for the seconds until steps go on. Then comes the run with all deaths. Its goodput is the
time that its steps take alone, by the time from its first step to its last.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from benchmarks.goodput.estimate import goodput
from benchmarks.goodput.training import Run
from benchmarks.measure import machine
from weft.units import Seconds

SCRIPT = Path(__file__).with_name("training.py")
RANKS, LIMIT = 2, 1800
# Steps of the runs that give what a prediction takes, and the first ones of a start that count for nothing.
PROBED, WARM = 40, 5


class Step(NamedTuple):
    """A step that was made: its number, when it ended (seconds of the clock), in which start of the ranks."""

    number: int
    time: float
    start: int


def main() -> int:
    """Returns 1 where the prediction is off by more than `--within`."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--between", type=int, default=60, help="steps between two deaths")
    parser.add_argument("--deaths", type=int, default=4)
    parser.add_argument("--within", type=float, default=0.05)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    alone = Seconds(median(_gaps(made(Run(PROBED, 0, ())))))
    once = made(Run(PROBED, 5, (PROBED // 2 + 3,)))
    held = _held(once, alone, 5)
    restart = _restart(once, alone)
    found = goodput(alone, Seconds(o.between * alone), held, restart)
    print(f"a step {alone:.3f} s, held {held:.3f} s a checkpoint, a restart {restart:.1f} s")
    print(f"predicted: {found}", flush=True)
    run = Run(*_deaths(found.every, o.between, o.deaths))
    steps = made(run)
    share = run.steps * alone / (steps[-1].time - steps[0].time + alone)
    off = found.share / share - 1
    print(f"measured: {share:.1%} over {run.steps} steps, {o.deaths} deaths; off by {off:+.1%}")
    if o.json:
        row = {"machine": machine(), "step": alone, "held": held, "restart": restart}
        row |= {"predicted": asdict(found), "measured": share, "steps": run.steps}
        o.json.write_text(json.dumps(row, indent=1))
    return int(abs(off) > o.within)


def _deaths(every: int, between: int, deaths: int) -> tuple[int, int, tuple[int, ...]]:
    """Steps, interval of checkpoints and the steps of deaths: each `between` steps after those of its start began.

    A start begins behind a checkpoint, so deaths fall at all distances from one.
    """
    begun, at = 0, list[int]()
    for number in range(deaths):
        # Spread over the interval, as moments that are drawn would be in the mean.
        at.append(begun + between + (2 * number + 1) * every // (2 * deaths) - every // 2)
        begun = (at[-1] - 1) // every * every
    return begun + between, every, tuple(at)


def made(run: Run) -> Sequence[Step]:
    """Make a run; gives all its steps in the order of time, those that were made again too."""
    with tempfile.TemporaryDirectory(prefix="goodput-") as folder:
        Path(folder, "run.json").write_text(json.dumps(asdict(run)))
        command = [sys.executable, "-m", "weft", "run", "-n", str(RANKS)]
        command += ["--restarts", str(len(run.deaths)), str(SCRIPT), folder]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        subprocess.run(command, check=True, timeout=LIMIT, env=environment)
        lines = Path(folder, "steps").read_text().splitlines()
    return [Step(*json.loads(line)) for line in lines]


def _gaps(steps: Sequence[Step], warm: int = WARM) -> list[float]:
    """Seconds of each step behind the first ones of a start."""
    begins = {step.start: step.number for step in reversed(steps)}
    return [
        late.time - early.time
        for early, late in pairwise(steps)
        if late.start == early.start and late.number >= begins[late.start] + warm
    ]


def _held(steps: Sequence[Step], alone: Seconds, every: int) -> Seconds:
    """Seconds that a checkpoint adds to the steps about it."""
    gaps = _gaps(steps)
    return Seconds(max(0.0, (sum(gaps) / len(gaps) - alone) * every))


def _restart(steps: Sequence[Step], alone: Seconds) -> Seconds:
    """Seconds from the last step before a death to the first one after it, without that one's own."""
    between = (
        late.time - early.time for early, late in pairwise(steps) if late.start != early.start
    )
    return Seconds(median(between) - alone)


if __name__ == "__main__":
    sys.exit(main())
