"""What `weft.search` reaches beside what must hold: its times, its plans beside those of experts and peers, real runs.

    OMP_NUM_THREADS=1 python -m benchmarks.search_bench --json runs/search/found.json
    OMP_NUM_THREADS=1 python -m benchmarks.search_bench --parts flexflow --only AlexNet --search-seconds 10

Each trial is a process of its own, so that nothing is warm. Trials of a file given by `--json` are not run again;
`--seconds` ends a part of them, and the next call goes on. The part "here" runs programs on this machine, which must be
idle; over slow links it needs root.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.measure import machine
from benchmarks.search import flexflow, here, holds, mixed, published, tight, times
from benchmarks.search.trial import Finding, Trial

# Seconds that a search has where no target says them.
SEARCH = 20.0
# Begins the line in which a trial's process says what it found.
FOUND = "found: "


def every_trial() -> dict[str, Trial]:
    """All trials by name, in the order of the table."""
    parts = (times, holds, tight, mixed, published, flexflow, here)
    return {each.name: each for part in parts for each in part.trials()}


def main() -> int:
    """Returns 1 when a trial could not be run."""
    o = _options()
    trials = every_trial()
    if o.trial:
        found = trials[o.trial].run(o.search_seconds)
        print(FOUND + json.dumps([asdict(each) for each in found]))
        return 0
    wanted = [each for each in trials.values() if _wanted(each, o.parts, o.only or ())]
    if o.list:
        print("\n".join(each.name for each in wanted))
        return 0
    known: dict[str, Any] = {}
    if o.json and o.json.exists():
        known = json.loads(o.json.read_text())["trials"]
    with tempfile.TemporaryDirectory(prefix="search-") as folder:
        os.environ.setdefault("WEFT_CACHE", folder)  # of what ranks measure
        failed = run([each for each in wanted if each.name not in known], known, o)
    found = [Finding(**each) for name in trials if name in known for each in known[name]["found"]]
    show([*found, *failed])
    return int(bool(failed))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    names = sorted({each.part for each in every_trial().values()})
    parser.add_argument("--parts", nargs="+", choices=names, default=names)
    parser.add_argument("--only", nargs="+", help="trials whose name contains one of these")
    parser.add_argument("--json", type=Path, help="read, and written after each trial")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of this call")
    parser.add_argument("--search-seconds", type=float, default=SEARCH, help="of a search")
    parser.add_argument("--list", action="store_true", help="list the trials and leave")
    parser.add_argument("--trial", help=argparse.SUPPRESS)
    return parser.parse_args()


def _wanted(trial: Trial, parts: Sequence[str], only: Sequence[str]) -> bool:
    return trial.part in parts and (not only or any(each in trial.name for each in only))


def run(left: Sequence[Trial], known: dict[str, Any], o: argparse.Namespace) -> Sequence[Finding]:
    """Run trials one by one and keep what they find; returns a miss for each that did not come to an end."""
    ends, failed = time.monotonic() + o.seconds, list[Finding]()
    for number, trial in enumerate(left):
        if time.monotonic() > ends:
            print(f"{len(left) - number} trials are left", flush=True)
            break
        begin = time.monotonic()
        found, error = _apart(trial, o.search_seconds)
        took = time.monotonic() - begin
        if error:
            failed.append(Finding(trial.name, "an end", error, False))
            print(f"{trial.name}: {error}", flush=True)
            continue
        known[trial.name] = {"found": found, "seconds": round(took, 1)}
        for each in found:
            print(f"{each['what']}: {each['measured']}", flush=True)
        if o.json:
            _keep(o.json, known)
    return failed


def _apart(trial: Trial, seconds: float) -> tuple[list[dict[str, Any]], str]:
    """What a trial finds in a process of its own, or why it found nothing."""
    command = [sys.executable, "-m", "benchmarks.search_bench", "--trial", trial.name]
    command += ["--search-seconds", str(seconds)]
    try:
        told = subprocess.run(
            command, timeout=trial.limit, capture_output=True, text=True, check=False
        )
    except subprocess.TimeoutExpired:
        return [], f"stopped after {trial.limit:.0f} s"
    lines = [line for line in told.stdout.splitlines() if line.startswith(FOUND)]
    if not lines:
        last = told.stderr.strip().splitlines()[-1:] or ["nothing was said"]
        return [], f"ended with {told.returncode}: {last[0]}"
    return list(json.loads(lines[-1].removeprefix(FOUND))), ""


def _keep(path: Path, known: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "trials": known}, indent=1))


def show(found: Sequence[Finding]) -> None:
    """Print the table, each target beside what was measured."""
    if not found:
        return
    table = Table("what", "target", "measured", "", "why", title="weft.search")
    for each in found:
        held = "" if each.held is None else "held" if each.held else "missed"
        table.add_row(each.what, each.target, each.measured, held, each.why)
    Console(width=None if Console().is_terminal else 200).print(table)
    judged = [each for each in found if each.held is not None]
    print(f"{sum(bool(each.held) for each in judged)} of {len(judged)} targets are held")


if __name__ == "__main__":
    sys.exit(main())
