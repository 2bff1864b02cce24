"""One work with one strategy, by all systems: same weights, same batches, turn by turn.

    OMP_NUM_THREADS=1 python -m benchmarks.compare --work gpt --strategy data_parallel

Losses must be those of a single device. Prints a line for each system; `--out` writes the rows as JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.crew import Crew, Enter, SystemFailure, this_host
from benchmarks.links import slow_links
from benchmarks.malloc import MALLOCS, Malloc, with_malloc
from benchmarks.references import References, check, reference_losses
from benchmarks.rounds import Side, take_turns
from benchmarks.rows import rows
from benchmarks.systems.system import Job, System
from benchmarks.systems.table import SYSTEMS, Entry
from benchmarks.works.table import TINY, WORKS

# Of weft's rows, those that start a second time with what is on disk.
WARM = ("weft", "weft auto")


@dataclass(frozen=True)
class Bench:
    """How to measure.

    Attributes:
        seconds: that all rounds together may take, about.
        rounds: how many there are; None for as many as the ratios need.
        least: of them, when their number is not given.
        timeout: seconds that any answer of a system may take.
        again: whether weft is built a second time, with what the first left on disk.
        references: a file that keeps the losses of a single device.
        enter: what each rank does first.
        malloc: how every system's allocator is set up.
    """

    seconds: float = 30.0
    rounds: int | None = None
    least: int = 6
    timeout: float = 150.0
    again: bool = True
    references: Path | None = None
    enter: Enter = this_host
    malloc: Malloc = "kept"

    def crew(self, build: Callable[[Job], System], job: Job) -> Crew:
        """The processes of a system; whatever it is, its allocator is set up alike."""
        return Crew(build, job, self.timeout, with_malloc(self.malloc, self.enter))


@dataclass(frozen=True)
class Compared:
    """What was found of a pair.

    Attributes:
        rows: of all systems; one that fails has a row that says so.
        loads: what the machine did besides, in each round.
    """

    rows: list[dict[str, Any]]
    loads: list[Mapping[str, Any]]


def compare(job: Job, entries: Sequence[Entry], link: str, bench: Bench) -> Compared:
    """Measure all systems, turn by turn.

    Args:
        job: the work, the strategy, the number of ranks.
        entries: the systems.
        link: what connects the ranks, for the rows.
        bench: how to measure.
    """
    errors: dict[str, str] = {}
    with ExitStack() as stack:
        references = reference_losses(job, bench.timeout, bench.references)
        sides: list[Side] = []
        for entry in entries:
            try:
                sides.append(start(entry, job, references, bench, stack))
            except SystemFailure as failure:
                errors[entry.name] = str(failure)
        turns = take_turns(sides, bench.rounds, bench.least, bench.seconds)
        errors |= turns.errors
        ran = [side for side in sides if side.entry.name not in errors]
        found = [side.found(turns.counted, turns.disturbed) for side in ran]
    head = {"work": job.name, "strategy": job.strategy, "ranks": job.ranks, "link": link}
    loads = [load.row() for load in turns.loads]
    return Compared(rows(head | {"malloc": bench.malloc}, found, errors), loads)


def start(entry: Entry, job: Job, references: References, bench: Bench, stack: ExitStack) -> Side:
    """A system that has been compiled and warmed up, whose losses agree and whose memory is known."""
    first = None
    if entry.name in WARM and bench.again:
        with bench.crew(entry.build, job) as crew:
            first, _ = crew.ready()
    crew = stack.enter_context(bench.crew(entry.build, job))
    built, loss = crew.ready()
    print(f"  {entry.name}: ready after {first or built:.1f} s", file=sys.stderr, flush=True)
    turn = crew.turn(1)  # by the third step DDP has filled its buckets anew
    peak = crew.peak()
    difference = None
    if entry.kind != "limit":
        difference = check((loss, *turn.losses, peak.losses[0]), references[entry.by_rank])
    again = None if first is None else built
    bytes_, resident = peak.bytes, peak.resident
    return Side(entry, crew, first or built, again, bytes_, resident, difference, turn.seconds)


def main() -> int:
    """Returns 1 when weft failed, or no peer ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--strategy", choices=SYSTEMS, required=True)
    parser.add_argument("--link", default="host", help='a rate of slow links, such as "1gbit"')
    parser.add_argument("--ranks", type=int, default=2, help="of all strategies but single")
    parser.add_argument("--systems", nargs="*", help="only these")
    parser.add_argument("--malloc", choices=MALLOCS, default="kept", help="of all systems alike")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--seconds", type=float, default=30.0, help="that the rounds may take")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--least", type=int, default=6, help="rounds, whatever they take")
    parser.add_argument("--once", action="store_true", help="do not build weft again")
    parser.add_argument("--references", type=Path, help="keeps losses of single devices")
    parser.add_argument("--out", type=Path, help="where the rows go")
    o = parser.parse_args()
    ranks = 1 if o.strategy == "single" else o.ranks
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
        settings = {"again": not o.once, "references": o.references, "enter": enter}
        bench = Bench(o.seconds, o.rounds, o.least, malloc=o.malloc, **settings)
        found = compare(job, entries, o.link, bench)
    for line in found.rows:
        print(json.dumps(line), flush=True)
    print(f"{time.perf_counter() - start_seconds:.0f} s", file=sys.stderr)
    if o.out:
        o.out.parent.mkdir(parents=True, exist_ok=True)
        o.out.write_text(json.dumps({"rows": found.rows, "loads": found.loads}, indent=1))
    return failed(found.rows)


def failed(lines: Sequence[Mapping[str, Any]]) -> int:
    """1 where weft failed; peers may, and limits as long as there is one."""
    kinds = {entry.name: entry.kind for each in SYSTEMS.values() for entry in each}
    wrong = [kinds[line["system"]] for line in lines if "error" in line]
    right = [kinds[line["system"]] for line in lines if "error" not in line]
    return int("own" in wrong or ("limit" in wrong and "limit" not in right))


if __name__ == "__main__":
    sys.exit(main())
