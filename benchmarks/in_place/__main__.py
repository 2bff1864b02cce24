"""From the death of a rank to the first step after it, in place and by a restart: `python -m benchmarks.in_place`.

A GPT of 6 layers of width 512 on four ranks, with a snapshot in memory after each step. The last rank kills itself
(SIGKILL). The run goes on with as many ranks or with one fewer, in place (`weft.elastic`) or by a restart of all. The
four take turns; of each, the medians over rounds, with the least and the most.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import NamedTuple, final

from benchmarks.measure import machine

SCRIPT = Path(__file__).with_name("training.py")
LIMIT = 600
# The moments that the first rank writes down, in the order in which they come after a death.
MOMENTS = ("killed", "begun", "compiled", "loaded", "stepped")


@final
class Way(NamedTuple):
    """A way to go on: in place or not, and with as many ranks or with one fewer."""

    in_place: bool
    fewer: bool

    @property
    def name(self) -> str:
        """In words."""
        how = "in place" if self.in_place else "restart"
        return f"{how}, {'one rank fewer' if self.fewer else 'as many ranks'}"


WAYS = tuple(Way(in_place, fewer) for fewer in (True, False) for in_place in (True, False))


def main() -> None:
    """Measure, print a line for each way, and write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    o = parser.parse_args()
    rounds: dict[str, list[list[float]]] = {way.name: [] for way in WAYS}
    for number in range(o.rounds):
        for way in WAYS if number % 2 else WAYS[::-1]:
            rounds[way.name].append(seconds_of(way, o.ranks))
        load = os.getloadavg()[0]
        if o.json:
            o.json.parent.mkdir(parents=True, exist_ok=True)
            rows = {"machine": machine(), "ranks": o.ranks, "load": load, "rounds": rounds}
            o.json.write_text(json.dumps(rows, indent=1))
    for name, found in rounds.items():
        print(line_of(name, found))


def line_of(name: str, found: Sequence[Sequence[float]]) -> str:
    """A way's medians: of the whole, with the least and the most, and of its parts.

    Args:
        name: of the way.
        found: by round, seconds after the death at which moments came.
    """
    whole = [each[-1] for each in found]
    before = [[0.0, *each[:-1]] for each in found]
    parts = [
        median(each[k] - early[k] for each, early in zip(found, before, strict=True))
        for k in range(len(MOMENTS) - 1)
    ]
    told = ", ".join(f"{moment} {s:.2f} s" for moment, s in zip(MOMENTS[1:], parts, strict=True))
    return f"{name}: {median(whole):.2f} s ({min(whole):.2f} to {max(whole):.2f}): {told}"


def seconds_of(way: Way, ranks: int) -> list[float]:
    """Make a run in which a rank dies; seconds from that to each of the moments behind it."""
    with tempfile.TemporaryDirectory(prefix="in-place-") as folder:
        command = [sys.executable, "-m", "weft", "run", "-n", str(ranks), "--restarts", "1"]
        command += ["--min-ranks", str(ranks - 1)] if way.fewer else []
        command += [str(SCRIPT), folder, "elastic" if way.in_place else "plain"]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        done = subprocess.run(
            command, check=True, timeout=LIMIT, env=environment, stderr=subprocess.PIPE, text=True
        )
        if way.in_place != ("in place" in done.stderr):
            raise RuntimeError(f"{way.name}: the run went on otherwise: {done.stderr[-2000:]}")
        times = dict(map(json.loads, Path(folder, "times").read_text().splitlines()))
    return [times[moment] - times["killed"] for moment in MOMENTS[1:]]


if __name__ == "__main__":
    main()
