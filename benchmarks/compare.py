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
    least: int = 5
    timeout: float = 150.0
    again: bool = True
    references: Path | None = None
    enter: Enter = this_host
    malloc: Malloc = "kept"

    def crew(self, build: Callable[[Job], System], job: Job) -> Crew:
        """The processes of a system; whatever it is, its allocator is set up alike."""
        return Crew(build, job, self.timeout, with_malloc(self.malloc, self.enter))


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
        references = reference_losses(job, bench.timeout, bench.references)
        sides: list[Side] = []
        for entry in entries:
            try:
                sides.append(start(entry, job, references, bench, stack))
            except SystemFailure as failure:
                errors[entry.name] = str(failure)
        errors |= take_turns(sides, bench.rounds, bench.least, bench.seconds)
        found = [side.found() for side in sides if side.entry.name not in errors]
    head = {"work": job.name, "strategy": job.strategy, "link": link, "malloc": bench.malloc}
    return rows(head, found, errors)


def start(entry: Entry, job: Job, references: References, bench: Bench, stack: ExitStack) -> Side:
    """A system that has been compiled and warmed up, whose losses agree and whose memory is known."""
    first = None
    if entry.kind == "own" and bench.again:
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
    return Side(entry, crew, first or built, again, peak.bytes, difference, turn.seconds)


def main() -> int:
    """Returns 1 when weft failed, or no peer ran."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", choices=WORKS, required=True)
    parser.add_argument("--strategy", choices=SYSTEMS, required=True)
    parser.add_argument("--link", default="host", help='a rate of slow links, such as "1gbit"')
    parser.add_argument("--systems", nargs="*", help="only these")
    parser.add_argument("--malloc", choices=MALLOCS, default="kept", help="of all systems alike")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    parser.add_argument("--seconds", type=float, default=30.0, help="that the rounds may take")
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--least", type=int, default=5, help="rounds, whatever they take")
    parser.add_argument("--once", action="store_true", help="do not build weft again")
    parser.add_argument("--references", type=Path, help="keeps losses of single devices")
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
        settings = {"again": not o.once, "references": o.references, "enter": enter}
        bench = Bench(o.seconds, o.rounds, o.least, malloc=o.malloc, **settings)
        lines = compare(job, entries, o.link, bench)
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
