"""The command: random programs by their seeds; it fails when any is wrong, hangs or ends in an internal error."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from itertools import count, islice
from pathlib import Path

import torch

from tools.random_programs.cases import Case, draw
from tools.random_programs.judge import Verdict, cause, judge
from tools.random_programs.large import act_large
from tools.random_programs.shrink import shrink
from tools.random_programs.text import case_text, namespace
from tools.workers import Lost, Worker

BAD = ("wrong", "internal", "hang", "invalid")
LIMIT = 300.0  # seconds that one case may take; ranks that wait for each other end sooner
EACH = 200  # cases after which a process is started anew


class Judge:
    """Judges scripts in a process of its own, one at a time.

    Args:
        large: as if all tensors were large.
        limit: seconds that one script may take.
    """

    def __init__(self, large: bool = False, limit: float = LIMIT) -> None:
        self._large = large
        self._worker: Worker[tuple[str, str], Verdict] = Worker(self._judged, limit, EACH)

    def _judged(self, script: tuple[str, str]) -> Verdict:
        torch.set_num_threads(1)
        if self._large:
            act_large()
        return judge(namespace(*script))

    def __call__(self, text: str, name: str) -> Verdict:
        """The verdict on a script."""
        self._worker.ask((text, name))
        found = self._worker.answer()
        if isinstance(found, Lost):
            return Verdict("hang" if found.hung else "internal", found.why)
        return found

    def stop(self) -> None:
        """End the process."""
        self._worker.stop()


def main() -> int:
    """Judge the cases that the command line names."""
    parser = argparse.ArgumentParser(prog="python -m tools.random_programs", description=__doc__)
    parser.add_argument("--count", type=int, default=2000, help="how many cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first")
    parser.add_argument("--only", type=int, nargs="+", help="seeds: print their scripts too")
    parser.add_argument(
        "--shrink", action="store_true", help="make failing cases as simple as they fail"
    )
    parser.add_argument(
        "--having", nargs="+", default=[], help="only cases that hold all these words"
    )
    parser.add_argument("--large", action="store_true", help="as if all tensors were large")
    parser.add_argument("--text", action="store_true", help="only print the scripts")
    parser.add_argument("--json", type=Path, help="where verdicts go, a line for each case")
    options = parser.parse_args()
    seeds = options.only or [*islice(_having(options.having, options.seed), options.count)]
    if options.text:
        for seed in seeds:
            print(case_text(draw(seed)))
        return 0
    return _run(seeds, options)


def _having(words: Sequence[str], first: int) -> Iterator[int]:
    """Seeds from the first on of which the case holds all words: names of blocks, layouts, features."""
    return (seed for seed in count(first) if all(word in str(draw(seed)) for word in words))


def _run(seeds: list[int], options: argparse.Namespace) -> int:
    judges, began = Judge(options.large), time.monotonic()
    found: dict[int, Verdict] = {}

    def judged(case: Case) -> Verdict:
        try:
            text = case_text(case)
        except Exception as error:
            return Verdict("invalid", f"{type(error).__name__}: {error}")
        return judges(text, f"<program {case.seed}>")

    for seed in seeds:
        start = time.monotonic()
        case = draw(seed)
        verdict = found[seed] = judged(case)
        bad = verdict.kind in BAD
        if bad and options.shrink:
            case, verdict = shrink(case, verdict, judged)
        if bad or options.only:
            print(f"{seed}: {verdict if options.only else verdict.why[:300]}", flush=True)
        if options.only:
            print(case_text(case))
        if options.json:
            _append(options.json, seed, found[seed], time.monotonic() - start)
    judges.stop()
    print(_summary(found))
    print(f"{time.monotonic() - began:.0f} s")
    return int(any(verdict.kind in BAD for verdict in found.values()))


def _append(path: Path, seed: int, verdict: Verdict, seconds: float) -> None:
    entry = {"seed": seed, "kind": verdict.kind, "why": verdict.why, "seconds": round(seconds, 2)}
    with path.open("a") as file:
        file.write(json.dumps({**entry, "details": verdict.details[-3000:]}) + "\n")


def _summary(found: dict[int, Verdict]) -> str:
    """Counts by kind, then causes with some of their seeds."""
    kinds = Counter(verdict.kind for verdict in found.values())
    causes: dict[str, list[int]] = defaultdict(list)
    for seed, verdict in found.items():
        if verdict.kind not in ("right", "sensitive"):
            causes[cause(verdict)].append(seed)
    lines = [f"{len(found)} cases: " + ", ".join(f"{n} {kind}" for kind, n in kinds.most_common())]
    for text, seeds in sorted(causes.items(), key=lambda entry: -len(entry[1])):
        lines.append(f"  {len(seeds)}: {text} ({', '.join(map(str, seeds[:6]))})")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
