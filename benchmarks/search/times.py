"""Seconds of searches of large models, and what they find in them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from time import perf_counter
from typing import final

import weft
from benchmarks.models import GPT_24, GPT_96, HALF, LLAMA_8B, gpt, llama, stored
from benchmarks.search.trial import Finding, Trial, searched, seconds_text


@final
@dataclass(frozen=True)
class Timed:
    """A search that must be done in some seconds.

    Attributes:
        name: of the trial.
        what: is searched, in words.
        job: makes the step.
        topology: of the machine.
        most: seconds that the search may take.
        gap: the most that other layouts may save of calls and boxing; None where no target says it.
        beside: what others take, in words.
        longer: seconds of a second search, which the first must come near to.
    """

    name: str
    what: str
    job: Callable[[], weft.Job]
    topology: str
    most: float
    gap: float | None = None
    beside: str = ""
    longer: float = 30.0


# Seconds of a trial, capture and the longer search included.
LIMIT = 240.0

TIMED = (
    Timed(
        name="gpt-96",
        what="GPT of 96 layers on 1,024 H100",
        job=partial(gpt, GPT_96, 1024),
        topology="h100x1024",
        most=60.0,
        gap=0.01,
        longer=0.0,
    ),
    Timed(
        name="llama-8b",
        what="Llama 3 8B on 64 H100",
        job=partial(llama, LLAMA_8B, 256),
        topology="h100x64",
        most=5.0,
        beside="autoparallel 46.8 s",
    ),
    Timed(
        name="gpt-24",
        what="GPT of 24 layers on 128 A100",
        job=partial(gpt, GPT_24, 1024),
        topology="a100-80gbx128",
        most=0.25,
        beside="Sailor 0.24 s, autoparallel 35 to 60 s, Alpa 2,393 s",
    ),
)


def trials() -> list[Trial]:
    """A trial for each."""
    return [Trial(f"times/{each.name}", partial(_tried, each), LIMIT) for each in TIMED]


def _tried(timed: Timed, _: float) -> Sequence[Finding]:
    begin = perf_counter()
    step = stored(timed.job(), HALF)
    captured = perf_counter() - begin
    target = f"<= {timed.most:g} s" + (f", additive gap <= {timed.gap:.0%}" if timed.gap else "")
    made = searched(step, timed.topology, seconds=timed.most, fixed=HALF)
    if isinstance(made, str):
        return [Finding(timed.what, target, f"no strategy: {made}", False, timed.beside)]
    found, took = made.result, made.took
    left = sum(found.skipped.values())
    figures = {
        "search_seconds": took,
        "capture_seconds": captured,
        "found": found.seconds,
        "gap": found.gap,
        "additive_gap": None if found.additive is None else found.additive.gap,
        "planned": len(found.tried),
        "skipped": dict(found.skipped),
        "nodes": len(step.graph.nodes),
    }
    told = f"{took:.2f} s: {made}, gap {found.gap:.1%}, {len(found.tried)} planned"
    additive = None if found.additive is None else found.additive.gap
    told += "" if additive is None else f", {additive:.2%} on the additive part"
    near = timed.gap is None or (additive is not None and additive <= timed.gap)
    held = took <= 1.05 * timed.most and near
    if timed.longer:
        more = weft.search(step, timed.topology, seconds=timed.longer, fixed=HALF)
        figures["longer"] = more.seconds
        told += f"; {timed.longer:g} s find {seconds_text(more.seconds)}"
    why = f"{left} points not planned" + (f"; {timed.beside}" if timed.beside else "")
    return [Finding(timed.what, target, told, held, why, figures)]
