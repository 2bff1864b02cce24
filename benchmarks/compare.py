"""One work with one strategy, by all systems: same weights, same batches, turn by turn.

    OMP_NUM_THREADS=1 python -m benchmarks.compare --work gpt --strategy data_parallel

Losses must be those of a single device. Prints a line for each system; `--out` writes the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.crew import Crew, Enter, SystemFailure, crew_of, this_host
from benchmarks.links import slow_links
from benchmarks.rows import Found, rows
from benchmarks.systems import plain
from benchmarks.systems.system import Job
from benchmarks.systems.table import SYSTEMS, Entry
from benchmarks.works.table import TINY, WORKS

# Steps whose losses are compared.
CHECKED = 3
# A loss may differ from the reference by this part of the way that the reference went.
TOLERANCE = 0.01
# A turn lasts at least so many seconds.
TURN = 0.2


@dataclass(frozen=True)
class Bench:
    """How to measure.

    Attributes:
        seconds: that all rounds together may take, about.
        rounds: how many there are; None for as many as fit into `seconds`, 3 to 25.
        timeout: seconds that any answer of a system may take.
        enter: what each rank does first.
    """

    seconds: float = 30.0
    rounds: int | None = None
    timeout: float = 150.0
    enter: Enter = this_host


@dataclass
class Side:
    """A system while it is measured."""

    entry: Entry
    crew: Crew
    compile_seconds: float
    warm_compile_seconds: float | None
    peak_bytes: int
    loss_difference: float | None
    step_seconds: float
    seconds: list[float] = field(default_factory=list)
    idle: float = 0.0

    @property
    def steps(self) -> int:
        """Of a turn."""
        return max(1, math.ceil(TURN / self.step_seconds))

    def found(self) -> Found:
        return Found(
            self.entry,
            self.seconds,
            self.compile_seconds,
            self.warm_compile_seconds,
            self.peak_bytes,
            self.loss_difference,
            self.idle,
        )


def compare(job: Job, entries: Sequence[Entry], link: str, bench: Bench) -> list[dict[str, Any]]:
    """The rows of all systems; one that fails has a row that says so.

    Args:
        job: the work, the strategy, the number of ranks.
        entries: the systems.
        link: what connects the ranks, for the rows.
        bench: how to measure.
    """
    errors: dict[str, str] = {}
    with ExitStack() as stack:
        references = reference_losses(job, bench)
        sides: list[Side] = []
        for entry in entries:
            try:
                sides.append(start(entry, job, references, bench, stack))
            except SystemFailure as failure:
                errors[entry.name] = str(failure)
        take_turns(sides, bench, errors)
        found = [side.found() for side in sides if side.entry.name not in errors]
    return rows(job.name, job.strategy, link, found, errors)


def reference_losses(job: Job, bench: Bench) -> Mapping[bool, Sequence[float]]:
    """The first losses of a single device; by whether the parts of a batch have statistics of their own."""
    alone = Job(job.name, job.work, "single")
    whole = crew_of(plain.eager, alone, bench.timeout, this_host, CHECKED)
    parted = whole
    if job.work.own_statistics:
        build = partial(plain.in_parts, parts=job.ranks)
        parted = crew_of(build, alone, bench.timeout, this_host, CHECKED)
    return {False: whole, True: parted}


def start(
    entry: Entry,
    job: Job,
    references: Mapping[bool, Sequence[float]],
    bench: Bench,
    stack: ExitStack,
) -> Side:
    """A system that has been compiled and warmed up, whose losses agree and whose memory is known."""
    cold = None
    if entry.kind == "own":
        with Crew(entry.build, job, bench.timeout, bench.enter) as crew:
            cold, _ = crew.ready()
    crew = stack.enter_context(Crew(entry.build, job, bench.timeout, bench.enter))
    built, first = crew.ready()
    turn = crew.turn(CHECKED - 1)
    difference = None
    if entry.kind != "limit":
        difference = check((first, *turn.losses), references[entry.by_rank])
    peak = crew.peak_bytes()
    step_seconds = turn.seconds
    seconds = [max(0.0, each - step_seconds) for each in (cold, built) if each is not None]
    warm = seconds[1] if entry.kind == "own" else None
    print(f"  {entry.name}: ready after {seconds[0]:.1f} s", file=sys.stderr, flush=True)
    return Side(entry, crew, seconds[0], warm, peak, difference, step_seconds)


def check(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference from the reference.

    Raises:
        SystemFailure: when a loss differs, seen beside how far the reference went.
    """
    differences = [abs(ours - right) for ours, right in zip(losses, reference, strict=True)]
    allowed = TOLERANCE * (max(reference) - min(reference))
    if not all(each <= allowed for each in differences):  # none is when one is no number
        raise SystemFailure(f"its losses are {losses}, those of a single device {reference}")
    return max(each / abs(right) for each, right in zip(differences, reference, strict=True))


def take_turns(sides: Sequence[Side], bench: Bench, errors: dict[str, str]) -> None:
    """Rounds in which every system has a turn, in either order; a system that fails is left out from there."""
    round_seconds = sum(side.steps * side.step_seconds for side in sides)
    fitting = int(bench.seconds / max(round_seconds, 1e-3))
    for number in range(bench.rounds or min(25, max(3, fitting))):
        for side in sides if number % 2 else sides[::-1]:
            if side.entry.name in errors:
                continue
            try:
                turn = side.crew.turn(side.steps)
            except SystemFailure as failure:
                errors[side.entry.name] = str(failure)
                continue
            side.seconds.append(turn.seconds)
            side.idle = max(side.idle, turn.idle)


def main() -> int:
    """Returns 1 when weft failed, or no peer ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--strategy", choices=SYSTEMS, required=True)
    parser.add_argument("--link", default="host", help='a rate of slow links, such as "1gbit"')
    parser.add_argument("--systems", nargs="*", help="only these")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--seconds", type=float, default=30.0, help="that the rounds may take")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--out", type=Path, help="where the rows go")
    o = parser.parse_args()
    ranks = 1 if o.strategy == "single" else 2
    job = Job(o.work, (TINY if o.tiny else WORKS)[o.work], o.strategy, 0, ranks)
    entries = [e for e in SYSTEMS[o.strategy] if o.systems is None or e.name in o.systems]
    start_seconds = time.perf_counter()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-"))
        # Caches are cold at first.
        os.environ |= {"WEFT_CACHE": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
        enter: Enter = this_host
        if o.link != "host":
            enter = stack.enter_context(slow_links(ranks, o.link)).enter
        lines = compare(job, entries, o.link, Bench(o.seconds, o.rounds, enter=enter))
    for line in lines:
        print(json.dumps(line), flush=True)
    print(f"{time.perf_counter() - start_seconds:.0f} s", file=sys.stderr)
    if o.out:
        o.out.parent.mkdir(parents=True, exist_ok=True)
        o.out.write_text(json.dumps(lines, indent=1))
    return failed(lines)


def failed(lines: Sequence[Mapping[str, Any]]) -> int:
    kinds = {entry.name: entry.kind for each in SYSTEMS.values() for entry in each}
    return int(any("error" in line and kinds[line["system"]] != "peer" for line in lines))


if __name__ == "__main__":
    sys.exit(main())
