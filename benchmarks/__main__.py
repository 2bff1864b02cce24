"""All benchmarks: `python -m benchmarks`, or `make bench`. Writes `runs/bench/results.json` and prints a table.

    python -m benchmarks --quick                     one work of each kind, fewer rounds
    python -m benchmarks --only gpt/zero3 lstm       these works, or pairs of work and strategy

Every pair of work and strategy is measured by a process of its own, one at a time. Ends with 1 when
one of them failed; its row says why.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.isa import trust_vector_instructions
from benchmarks.malloc import MALLOCS
from benchmarks.measure import OUT, machine
from benchmarks.page import show
from benchmarks.pairs import PAIRS, QUICK, RANKS, Pair
from tools.scores.stamp import stamp_now

SOURCES = ("src/weft", "benchmarks")
RESULTS = OUT / "results.json"
# The losses of single devices, while this program runs.
REFERENCES = OUT / "references.json"

# Seconds after which a process is stopped, several times what it takes.
LIMIT = 900
# Rounds of a pair, whatever they take; and when it is clear that all will take too long.
LEAST, FEWER = 6, 3


def options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="weft beside its peers.")
    parser.add_argument("--only", nargs="+", help="works, or work/strategy")
    parser.add_argument("--quick", action="store_true", help="a few pairs, fewer rounds")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--malloc", choices=MALLOCS, default="kept", help="of all systems alike")
    parser.add_argument("--seconds", type=float, help="for the rounds of a pair; 15, quick 8")
    parser.add_argument("--minutes", type=float, default=75.0, help="fewer rounds when late; 75")
    parser.add_argument("--add", action="store_true", help="keep what is there of other pairs")
    parser.add_argument("--list", action="store_true", help="print the pairs and end")
    o = parser.parse_args()
    known = {name for pair in PAIRS for name in (pair.name, pair.work)}
    unknown = [name for name in o.only or () if name not in known]
    if unknown:
        parser.error(f"--only {' '.join(unknown)}: no such work or pair; --list shows them all")
    return o


def wanted(pair: Pair, o: argparse.Namespace) -> bool:
    if pair.link != "host" and os.geteuid() != 0:
        return False  # only root can make networks
    if o.only:
        return any(each in (pair.name, pair.work) for each in o.only)
    return not o.quick or pair.name in QUICK


@dataclass(frozen=True)
class Measured:
    """What was found of a pair.

    Attributes:
        rows: of all systems.
        loads: what the machine did besides, in each round.
        well: whether nothing failed.
    """

    rows: list[dict[str, Any]]
    loads: list[dict[str, Any]]
    well: bool

    @property
    def disturbed(self) -> int:
        """Rounds that count although others disturbed them."""
        return max((row.get("disturbed", 0) for row in self.rows), default=0)


def measure(pair: Pair, o: argparse.Namespace, least: int) -> Measured:
    """Measure a pair; a process that fails as a whole has one row."""
    out = OUT / "pairs" / f"{pair.name.replace('/', '_')}.json"
    out.unlink(missing_ok=True)
    command = ["-m", "benchmarks.compare", "--work", pair.work, "--strategy", pair.strategy]
    command += [
        "--ranks",
        str(pair.ranks),
        "--link",
        pair.link,
        "--malloc",
        o.malloc,
        "--out",
        str(out),
    ]
    command += ["--seconds", str(o.seconds or (8 if o.quick else 15)), "--least", str(least)]
    command += ["--references", str(REFERENCES), "--systems", *pair.systems]
    command += [] if "weft auto" in pair.systems else ["--once"]
    ended = run(command + (["--tiny", "--rounds", "1"] if o.tiny else []))
    if out.exists():
        told = json.loads(out.read_text())
        return Measured(told["rows"], told["loads"], not ended)
    head = {"work": pair.work, "strategy": pair.strategy, "ranks": pair.ranks, "link": pair.link}
    error = {"malloc": o.malloc, "system": "all", "error": ended or "no rows were written"}
    return Measured([head | error], [], False)


def merged(old: Sequence[dict[str, Any]], new: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The new rows, and in their old places the old ones of other pairs."""

    def place(row: dict[str, Any]) -> Pair:
        return Pair(row["work"], row["strategy"], row["link"], max(RANKS, row.get("ranks", RANKS)))

    measured = {place(row) for row in new}
    every = [*(row for row in old if place(row) not in measured), *new]
    order = {pair: number for number, pair in enumerate(PAIRS)}
    return sorted(every, key=lambda row: order.get(place(row), len(order)))


def run(command: Sequence[str]) -> str:
    """Run a benchmark with one thread; what went wrong, or nothing."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": "."}
    started = [sys.executable, *command]
    process = subprocess.Popen(started, env=environment, stdout=subprocess.DEVNULL)
    try:
        code = process.wait(LIMIT)
    except subprocess.TimeoutExpired:
        process.kill()  # its ranks end with it
        process.wait()
        return f"not done after {LIMIT} s"
    return f"exit code {code}" if code else ""


def main() -> int:
    """Measure what is asked for; returns 1 when something failed."""
    o = options()
    pairs = [pair for pair in PAIRS if wanted(pair, o)]
    if o.list:
        print("\n".join(pair.name for pair in pairs))
        return 0
    REFERENCES.unlink(missing_ok=True)
    trust_vector_instructions()
    there = json.loads(RESULTS.read_text()) if o.add and RESULTS.exists() else {}
    old, loads = there.get("rows", []), there.get("loads", {})
    # What is added to older rows makes them no younger.
    made = there.get("made") or str(stamp_now("make bench", SOURCES))
    clock = Clock(sum(pair.seconds for pair in pairs), o.minutes)
    found: dict[str, Measured] = {}

    def written() -> dict[str, Any]:
        rows = merged(old, [row for each in found.values() for row in each.rows])
        told = {**loads, **{name: each.loads for name, each in found.items()}}
        return write(rows, told, o.malloc, clock.minutes, made)

    for pair in pairs:
        least = FEWER if clock.late else LEAST
        clock.next(pair.name, pair.seconds)
        found[pair.name] = measure(pair, o, least)
        written()
    disturbed = [] if o.tiny else [pair for pair in pairs if found[pair.name].disturbed]
    for pair in disturbed:
        if clock.late:
            break
        clock.next(f"{pair.name} again", pair.seconds)
        again = measure(pair, o, LEAST)
        found[pair.name] = min(found[pair.name], again, key=lambda each: each.disturbed)
    show(written())
    well = bool(pairs) and all(each.well for each in found.values())
    return int(not well)


def write(
    rows: Sequence[dict[str, Any]],
    loads: Mapping[str, Sequence[Mapping[str, Any]]],
    malloc: str,
    minutes: float,
    made: str,
) -> dict[str, Any]:
    """`results.json`, after each pair: nothing is lost when somebody stops the rest."""
    result = {
        "command": shlex.join(["python", "-m", "benchmarks", *sys.argv[1:]]),
        "machine": machine(),
        "malloc": malloc,
        "transport": "shared memory and Gloo on one host, Gloo over slow links; peers Gloo",
        "minutes": minutes,
        "made": made,
        "rows": rows,
        "loads": loads,
    }
    RESULTS.parent.mkdir(parents=True, exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1))
    return result


class Clock:
    """Says what runs now and how long the rest takes, by what the earlier took beside their estimates."""

    def __init__(self, planned: float, minutes: float) -> None:
        """`planned`: seconds that everything takes, as estimated. `minutes`: that it may take."""
        self._start, self._planned, self._begun = time.perf_counter(), planned, 0.0
        self._allowed = minutes

    @property
    def minutes(self) -> float:
        return (time.perf_counter() - self._start) / 60

    @property
    def left(self) -> float:
        """Minutes that what has not begun takes at the pace so far."""
        pace = self.minutes / self._begun if self._begun else 1 / 60
        return max(0.0, self._planned - self._begun) * pace

    @property
    def late(self) -> bool:
        """Whether all will take more than it may."""
        return self._begun > 0 and self.minutes + self.left > self._allowed

    def next(self, name: str, seconds: float) -> None:
        """Something begins that is estimated to take `seconds`."""
        line = f"{name} … {self.minutes:.0f} min, {self.left:.0f} left"
        print(line, file=sys.stderr, flush=True)
        self._begun += seconds


if __name__ == "__main__":
    sys.exit(main())
