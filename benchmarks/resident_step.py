"""Memory that a rank's process has resident at the peak of a step, of weft and of its peers; nothing is timed.

    OMP_NUM_THREADS=1 python -m benchmarks.resident_step --json runs/bench/resident_step.json

One system after another, two ranks, each with processes of its own, set up as `python -m benchmarks` does it. The pairs
that a file given by `--json` has are not run again; with `--own` weft's rows of them are, beside the peers' that stand
there. Prints a row for each pair: weft's bytes over the best peer's.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.compare import Bench
from benchmarks.crew import SystemFailure
from benchmarks.measure import machine
from benchmarks.pairs import PAIRS, RANKS, Pair
from benchmarks.systems.system import Job
from benchmarks.systems.table import SYSTEMS, Entry
from benchmarks.works.table import TINY, WORKS

COLUMNS = (
    "pair",
    "weft MiB",
    "tensors",
    "best peer MiB",
    "tensors",
    "peer",
    "resident over the peer's",
)


def main() -> None:
    o = _options()
    works = TINY if o.tiny else WORKS
    pairs: dict[str, Any] = {}
    if o.json.exists():
        pairs = json.loads(o.json.read_text())["pairs"]
    for pair in _pairs(o.only):
        known = pairs.get(pair.name, {})
        if o.own or not known:
            found = _systems_of(pair, Bench(timeout=o.timeout), works, bool(known))
            pairs[pair.name] = {**known, **found}
            o.json.parent.mkdir(parents=True, exist_ok=True)
            o.json.write_text(json.dumps({"machine": machine(), "pairs": pairs}, indent=1) + "\n")
    _show(pairs)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Resident memory at the peak of a step.")
    parser.add_argument("--json", type=Path, default=Path("runs/bench/resident_step.json"))
    parser.add_argument("--only", nargs="+", help="pairs whose name contains one of these")
    parser.add_argument("--own", action="store_true", help="weft's rows anew, where peers' stand")
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds of an answer")
    parser.add_argument("--tiny", action="store_true", help="sizes that only show that it runs")
    return parser.parse_args()


def _pairs(only: list[str] | None) -> list[Pair]:
    """Those of this host, on two ranks or one."""
    here = [each for each in PAIRS if each.link == "host" and each.ranks == RANKS]
    return [each for each in here if not only or any(part in each.name for part in only)]


def _systems_of(pair: Pair, bench: Bench, works: Mapping[str, Any], own: bool) -> dict[str, Any]:
    """Of each system that is worth the time, but for limits: bytes of one rank, or an error; `own` for weft's alone."""
    ranks = 1 if pair.strategy == "single" else pair.ranks
    job = Job(pair.work, works[pair.work], pair.strategy, ranks=ranks)
    found: dict[str, Any] = {}
    for entry in SYSTEMS[pair.strategy]:
        if (
            entry.kind not in (("own",) if own else ("own", "peer"))
            or entry.name not in pair.systems
        ):
            continue
        found[entry.name] = {"kind": entry.kind, **_of(entry, job, bench)}
        print(f"  {pair.name}: {entry.name}: {found[entry.name]}", file=sys.stderr, flush=True)
    return found


def _of(entry: Entry, job: Job, bench: Bench) -> dict[str, Any]:
    try:
        with bench.crew(entry.build, job) as crew:
            crew.ready()
            crew.turn(1)  # by the third step DDP has filled its buckets anew
            peak = crew.peak()
    except SystemFailure as failure:
        return {"error": str(failure)}
    return {"resident_bytes": peak.resident, "peak_bytes": peak.bytes}


def _show(pairs: Mapping[str, Any]) -> None:
    table = Table(*COLUMNS)
    for name, systems in pairs.items():
        ran = {key: each for key, each in systems.items() if "error" not in each}
        peers = [key for key, each in ran.items() if each["kind"] == "peer"]
        if "weft" not in ran or not peers:
            continue
        best = min(peers, key=lambda key: float(ran[key]["resident_bytes"]))
        cells = [
            f"{ran[key][of] / 2**20:.0f}"
            for key in ("weft", best)
            for of in ("resident_bytes", "peak_bytes")
        ]
        ratio = ran["weft"]["resident_bytes"] / ran[best]["resident_bytes"]
        table.add_row(name, *cells, best, f"{ratio:.2f}")
    Console(width=None if Console().is_terminal else 140).print(table)


if __name__ == "__main__":
    main()
