"""Real runs on two ranks of this machine: searched strategies beside those by hand, of weft and of peers.

All sides of a work run in rounds, turn by turn, and their losses must be those of one device. The costs that a search
takes are measured by the same ranks first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import median

from benchmarks.compare import Bench, start
from benchmarks.crew import Crew, Enter, SystemFailure, this_host
from benchmarks.links import slow_links
from benchmarks.pairs import PAIRS, Pair
from benchmarks.references import reference_losses
from benchmarks.rounds import Side, take_turns
from benchmarks.rows import Found, quartiles, ratios
from benchmarks.search.searched import auto, hand_strategies, measuring
from benchmarks.search.trial import Finding, Trial, seconds_text
from benchmarks.search.works import WORKS
from benchmarks.systems import own
from benchmarks.systems.system import Job
from benchmarks.systems.table import SYSTEMS, Entry

RANKS = 2
HOST, SLOW = "host", ("1gbit", "100mbit")
# Of the pairs of `make bench` on two ranks, and the six workloads' two.
WORKS_HERE = (
    *dict.fromkeys(pair.work for pair in PAIRS if pair.strategy != "single"),
    *("mlp_small", "lstm", "lstm_cells", "alexnet", "rnnlm"),
)
WORKS_APART = ("gpt", "llama", "wide_deep", "split_softmax", "mixtral", "mlp", "alexnet", "rnnlm")
# A searched strategy beside weft's own by hand, and beside peers over slow links.
BY_HAND, BY_PEERS = 0.97, 1.5
# Seconds of the rounds of a work, and of an answer of a rank.
ROUNDS, PATIENCE = 30.0, 420.0


def trials() -> list[Trial]:
    """One for each work on this host, one for each of some over slow links, and one with a limit of memory."""
    return [
        *(Trial(f"here/{work}/{HOST}", partial(_hand, work), 1200) for work in WORKS_HERE),
        *(
            Trial(f"here/{work}/{link}", partial(_peers, work, link), 2400)
            for link in SLOW
            for work in WORKS_APART
        ),
        Trial("here/memory limit", _limit),
    ]


def _job(work: str, strategy: str) -> Job:
    return Job(work, WORKS[work], strategy, ranks=RANKS)


def _hand(work: str, seconds: float) -> Sequence[Finding]:
    names = hand_strategies(_job(work, "data_parallel"))
    sides = [(Entry(name, own.aten, "peer"), _job(work, name)) for name in names]
    what = f"{work} on {RANKS} ranks: auto against the best of weft by hand"
    return _run(what, work, HOST, sides, seconds, BY_HAND)


def _peers(work: str, link: str, seconds: float) -> Sequence[Finding]:
    job = _job(work, "data_parallel")
    sides = [
        (Entry(f"{strategy}: {each.name}", each.build, "peer", each.by_rank), _job(work, strategy))
        for strategy in _of_peers(job)
        for each in _worth_it(work, strategy, link)
    ]
    what = f"{work} on {RANKS} ranks over {link}: auto against the best peer"
    return _run(what, work, link, sides, seconds, BY_PEERS)


def _of_peers(job: Job) -> list[str]:
    """The strategies by hand, and pipelines of what peers can cut."""
    names = hand_strategies(job)
    cut = bool(job.work.chain(job.work.model()))
    return [*names, "pipeline"] if cut and "pipeline" not in names else names


def _worth_it(work: str, strategy: str, link: str) -> Iterator[Entry]:
    names = Pair(work, strategy, link).systems
    yield from (each for each in SYSTEMS[strategy] if each.kind == "peer" and each.name in names)


def _run(
    what: str,
    work: str,
    link: str,
    others: Sequence[tuple[Entry, Job]],
    seconds: float,
    target: float,
) -> Sequence[Finding]:
    """Measure costs, start all sides, let them take turns."""
    job, errors = _job(work, "data_parallel"), dict[str, str]()
    with ExitStack() as stack:
        _measured(job)
        enter: Enter = this_host
        if link != HOST:
            enter = stack.enter_context(slow_links(RANKS, link)).enter
        bench = Bench(timeout=PATIENCE, again=False, enter=enter)
        references = reference_losses(job, PATIENCE)
        sides: list[Side] = []
        for entry, own_job in [(Entry("auto", auto(seconds), "own"), job), *others]:
            try:
                sides.append(start(entry, own_job, references, bench, stack))
            except SystemFailure as failure:
                errors[entry.name] = str(failure)
        if not sides or sides[0].entry.kind != "own":
            return [Finding(what, f">= {target:g}x", errors["auto"][:300], False)]
        chosen = sides[0].crew.predict()[0]["strategy"]
        turns = take_turns(sides, None, 5, ROUNDS)
        errors |= turns.errors
    ran = [side for side in sides if side.entry.name not in errors]
    found = [side.found(turns.counted, turns.disturbed) for side in ran]
    return [_judged(what, found, chosen, errors, target)]


def _measured(job: Job) -> None:
    """Costs of this machine for a work, kept where searches look for them."""
    with Crew(measuring, job, PATIENCE) as crew:
        crew.ready()


def _judged(
    what: str, ran: Sequence[Found], chosen: str, errors: dict[str, str], target: float
) -> Finding:
    ours = next(each for each in ran if each.entry.kind == "own")
    found = [each for each in ran if each.entry.kind != "own"]
    best = min(found, key=lambda each: each.median)
    faster = ratios(best, ours)
    ratio, (low, high) = median(faster), quartiles(faster)
    told = (
        f"{ratio:.2f}x ({low:.2f} to {high:.2f}): auto {seconds_text(ours.median)} ({chosen}); "
        f"{best.entry.name} {seconds_text(best.median)}"
    )
    figures = {
        "ratio": ratio,
        "auto": ours.median,
        "others": {each.entry.name: each.median for each in found},
        "peak_bytes": {each.entry.name: each.peak_bytes for each in (ours, *found)},
        "build_seconds": ours.compile_seconds,
        "rounds": len(ours.seconds),
        "disturbed": ours.disturbed,
    }
    failed = "; ".join(f"{name}: {text[:80]}" for name, text in errors.items())
    return Finding(what, f">= {target:g}x", told, ratio >= target, failed, figures)


def _limit(seconds: float) -> Sequence[Finding]:
    """What a searched program holds, under nine tenths of what data parallel holds."""
    job = _job("gpt", "data_parallel")
    with ExitStack() as stack:
        _measured(job)
        plain = stack.enter_context(Crew(own.aten, job, PATIENCE))
        plain.ready()
        limit = int(0.9 * plain.peak().bytes)
        crew = stack.enter_context(Crew(auto(seconds, limit), job, PATIENCE))
        crew.ready()
        held, chosen = crew.peak().bytes, crew.predict()[0]["strategy"]
    told = f"{held / 1e6:.1f} of {limit / 1e6:.1f} MB: {chosen}"
    what = "gpt on 2 ranks, a limit of 90 % of data parallel, measured"
    return [Finding(what, "never exceeded", told, held <= limit)]
