"""Predicted beside measured seconds of steps on this machine, for steps that nothing was fitted to.

    OMP_NUM_THREADS=1 python -m benchmarks.accuracy_here --works mlp gpt --ranks 1 2 --json here.json --seconds 480

Each case is a work of the benchmarks, a strategy, a number of samples and of ranks, and links. Its ranks are processes;
they measure the case's distinct calls, updates, exchanges and overheads side by side, the simulator predicts the step
from these, and the step is run: in rounds, so that what else the machine does meets both. The noise is how far the
medians of the first and the last rounds lie apart; what an error is beyond it counts.

Cases of a file given by `--json` are not run again; `--seconds` ends a part, and the next call goes on. `--bench` takes
the pairs of `python -m benchmarks` alone; those over slow links need root.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from benchmarks.accuracy.score import score
from benchmarks.crew import Crew, SystemFailure, this_host
from benchmarks.links import LinksError, slow_links
from benchmarks.measure import machine
from benchmarks.pairs import PAIRS
from benchmarks.systems import own
from benchmarks.systems.system import Job
from benchmarks.works.table import WORKS
from benchmarks.works.work import Batch, Work

STRATEGIES = ("single", "data_parallel", "zero3", "tensor_parallel", "pipeline", "split", "expert")
SHARES = (1.0, 0.5, 2.0)
RANKS = (1, 2, 4)
# Works that are made for another number of ranks: cases of the benchmarks alone.
OTHER_RANKS = {pair.work for pair in PAIRS if pair.ranks not in RANKS}
HOST = "host"
# Seconds that a rank may take for an answer.
PATIENCE = 300.0
# Rounds of a prediction and some turns, each of so many seconds about.
ROUNDS, TURNS, SECONDS = 2, 5, 0.3


@dataclass(frozen=True)
class Case:
    """One step that is predicted and run.

    Attributes:
        work, strategy: their names.
        share: of the work's samples that a batch has.
        ranks: how many there are.
        link: "host", or the rate of slow links.
    """

    work: str
    strategy: str
    share: float
    ranks: int
    link: str = HOST

    def __str__(self) -> str:
        return f"{self.group}/{self.strategy}"

    @property
    def group(self) -> str:
        """The cases that a user would choose a strategy from."""
        over = "" if self.link == HOST else f" over {self.link}"
        return f"{self.work} x{self.share:g} on {self.ranks}{over}"


@dataclass(frozen=True)
class Outcome:
    """What came out.

    Attributes:
        case: in words.
        group: of the case.
        predicted, measured: seconds of a step.
        low, high: the predicted 5th and 95th percentile.
        noise: how far the two halves of the turns lie apart, as a part of their median.
        inside: the part of all steps between `low` and `high`.
        turns: seconds of a step in each turn.
        planned_bytes, held_bytes: the peak of the plan, and what was measured.
        planned_sent, sent: bytes that all ranks send in a step.
        estimates: what had to be guessed.
    """

    case: str
    group: str
    predicted: float
    measured: float
    low: float
    high: float
    noise: float
    inside: float
    turns: Sequence[float]
    planned_bytes: int
    held_bytes: int
    planned_sent: int
    sent: int
    estimates: Sequence[str]

    @property
    def error(self) -> float:
        """Of the prediction, as a part of what was measured."""
        return abs(self.predicted / self.measured - 1)

    @property
    def beyond(self) -> float:
        """The error beyond the noise."""
        return max(0.0, self.error - self.noise)

    @property
    def memory_error(self) -> float:
        """Of the plan's peak, as a part of what was held."""
        return abs(self.planned_bytes / max(self.held_bytes, 1) - 1)

    def __str__(self) -> str:
        return (
            f"{self.case}: predicted {1e3 * self.predicted:.2f} ms, measured {1e3 * self.measured:.2f} ms, "
            f"error {self.predicted / self.measured - 1:+.1%}, noise {self.noise:.1%}, {self.inside:.0%} inside, "
            f"memory {self.memory_error:.1%} off, sent {self.planned_sent} of {self.sent}"
        )


def cases(works: Sequence[str], strategies: Sequence[str], ranks: Sequence[int]) -> Iterator[Case]:
    for work in (work for work in works if work not in OTHER_RANKS):
        for strategy in strategies:
            for count in ranks:
                if (strategy == "single") == (count == 1) and fits(WORKS[work], strategy):
                    # Capacities are those of the whole batch.
                    shares = SHARES[:1] if strategy == "expert" else SHARES
                    yield from (Case(work, strategy, share, count) for share in shares)


def bench_cases() -> Iterator[Case]:
    """The pairs of the benchmarks, each on its own number of ranks."""
    for pair in PAIRS:
        count = 1 if pair.strategy == "single" else pair.ranks
        yield Case(pair.work, pair.strategy, 1.0, count, pair.link)


def fits(work: Work, strategy: str) -> bool:
    """True where a strategy says something about a work."""
    if strategy == "tensor_parallel":
        return bool(work.columns)
    if strategy in ("split", "expert"):
        return bool(work.tables if strategy == "split" else work.experts)
    return strategy != "pipeline" or bool(work.blocks(work.model()))


def work_of(case: Case) -> Work:
    """The work with as many samples as the case wants."""
    work = WORKS[case.work]

    def batch() -> Batch:
        whole = work.make_batch()
        return {name: resized(leaf, case.share) for name, leaf in whole.items()}

    return replace(work, make_batch=batch)


def resized(leaf: Tensor, share: float) -> Tensor:
    """A share of the samples; of more than all, some twice."""
    count = max(1, round(len(leaf) * share))
    return leaf.repeat(-(-count // len(leaf)), *[1] * (leaf.dim() - 1))[:count].contiguous()


def outcome(case: Case) -> Outcome:
    # As many micro-batches as divide the samples of all shares.
    micro_batches = 8 if case.work == "gpt8" else 4
    job = Job(
        case.work, work_of(case), case.strategy, ranks=case.ranks, micro_batches=micro_batches
    )
    with ExitStack() as stack:
        enter = this_host
        if case.link != HOST:
            enter = stack.enter_context(slow_links(case.ranks, case.link)).enter
        crew = stack.enter_context(Crew(own.aten, job, PATIENCE, enter))
        crew.ready()
        crew.turn(2)
        told, turns = list[Any](), list[Any]()
        for _ in range(ROUNDS):
            told.append(crew.predict())
            steps = max(1, round(SECONDS / max(told[0][0]["seconds"], 1e-4)))
            turns += [crew.turn(steps) for _ in range(TURNS)]
        peak = crew.peak()
    first = told[0][0]
    seconds, low, high = (
        statistics.median(each[0][name] for each in told) for name in ("seconds", "low", "high")
    )
    every = [step for turn in turns for step in turn.steps]
    means = [turn.seconds for turn in turns]
    median = statistics.median(means)
    halves = (
        statistics.median(means[: len(means) // 2]),
        statistics.median(means[len(means) // 2 :]),
    )
    return Outcome(
        case=str(case),
        group=case.group,
        predicted=seconds,
        measured=median,
        low=low,
        high=high,
        noise=abs(halves[0] - halves[1]) / median,
        inside=statistics.mean(low <= step <= high for step in every),
        turns=means,
        planned_bytes=max(each["peak"] for each in told[0]),
        held_bytes=peak.bytes,
        planned_sent=first["planned_sent"],
        sent=sum(each["sent"] for each in told[0]),
        estimates=first["estimates"],
    )


def summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """The figures that targets are set for."""
    found = score([each.measured for each in outcomes], [each.predicted for each in outcomes])
    groups: dict[str, list[Outcome]] = {}
    for each in outcomes:
        groups.setdefault(each.group, []).append(each)
    regrets = [regret(own) for own in groups.values() if len(own) > 1]
    return {
        "cases": len(outcomes),
        "median error": found.median_error,
        "95th percentile of errors": percentile([each.error for each in outcomes]),
        "median error beyond noise": statistics.median(each.beyond for each in outcomes),
        "95th percentile beyond noise": percentile([each.beyond for each in outcomes]),
        "median noise": statistics.median(each.noise for each in outcomes),
        "spearman": found.spearman,
        "choices": len(regrets),
        "mean regret": statistics.mean(regrets) if regrets else None,
        "largest regret": max(regrets, default=None),
        "memory off at most": max(each.memory_error for each in outcomes),
        "memory off, median": statistics.median(each.memory_error for each in outcomes),
        "steps inside the interval": statistics.mean(each.inside for each in outcomes),
        "bytes sent exact": sum(each.sent == each.planned_sent for each in outcomes),
        "with estimates": sum(bool(each.estimates) for each in outcomes),
    }


def regret(group: Sequence[Outcome]) -> float:
    """What the predicted best takes longer than the best."""
    chosen = min(group, key=lambda each: each.predicted)
    return chosen.measured / min(each.measured for each in group) - 1


def percentile(errors: Sequence[float]) -> float:
    return sorted(errors)[min(len(errors) - 1, round(0.95 * (len(errors) - 1)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--works", nargs="+", default=list(WORKS), choices=list(WORKS))
    parser.add_argument("--strategies", nargs="+", default=list(STRATEGIES), choices=STRATEGIES)
    parser.add_argument("--ranks", nargs="+", type=int, help="1, 2, 4, and those of the benchmarks")
    parser.add_argument("--bench", action="store_true", help="the pairs of the benchmarks alone")
    parser.add_argument("--json", type=Path, help="read, and written after each case")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="of a part")
    parser.add_argument("--seed", type=int, help="of the order of cases that are in no benchmark")
    parser.add_argument("--list", action="store_true", help="list the cases and leave")
    o = parser.parse_args()
    known = json.loads(o.json.read_text())["cases"] if o.json and o.json.exists() else []
    done = {each["case"]: Outcome(**each) for each in known}
    others = [] if o.bench else list(cases(o.works, o.strategies, o.ranks or RANKS))
    if o.seed is not None:
        random.Random(o.seed).shuffle(others)
    wanted = dict.fromkeys((*bench_cases(), *others))
    if not o.bench:
        wanted = {
            case: None for case in wanted if case.work in o.works and case.strategy in o.strategies
        }
        wanted = {case: None for case in wanted if not o.ranks or case.ranks in o.ranks}
    if o.list:
        print("\n".join(map(str, wanted)), f"\n{len(wanted)} cases", sep="")
        return
    run([case for case in wanted if str(case) not in done], done, o.json, o.seconds)
    if done:
        print(json.dumps(summary(list(done.values())), indent=1))


def run(left: Sequence[Case], done: dict[str, Outcome], path: Path | None, seconds: float) -> None:
    """Run cases for so many seconds, and keep what comes out."""
    ends = time.monotonic() + seconds
    for number, case in enumerate(left):
        if time.monotonic() > ends:
            print(f"{len(left) - number} cases are left", flush=True)
            return
        try:
            found = done[str(case)] = outcome(case)
        except (SystemFailure, LinksError) as failure:
            print(f"{case}: {failure}", flush=True)
            continue
        print(found, flush=True)
        if path:
            every = [asdict(each) for each in done.values()]
            path.write_text(json.dumps({"machine": machine(), "cases": every}, indent=1))


if __name__ == "__main__":
    main()
