"""A machine of two kinds of devices, searched whole and each kind alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from time import perf_counter

import weft
from benchmarks.search.models import OPT_350M, gpt, stored
from benchmarks.search.trial import Finding, Trial, seconds_text
from weft.errors import UserError

WHOLE = Path(__file__).with_name("mixed.yaml")
ALONE = ("a100-40gbx128", "v100x384")
MOST = 10.0
# V100 have no bfloat16.
NARROW = weft.Strategy(precision="fp16")
# Sequences of a step, as many as divide both numbers of devices.
SEQUENCES = 1536


def trials() -> list[Trial]:
    """One trial."""
    return [Trial("mixed/opt-350m", _tried)]


def _tried(seconds: float) -> Sequence[Finding]:
    step = stored(gpt(OPT_350M, SEQUENCES), NARROW)
    alone = {each: _searched(step, each, max(seconds, MOST)) for each in ALONE}
    begin = perf_counter()
    whole = _searched(step, str(WHOLE), MOST)
    took = perf_counter() - begin
    what = "OPT 350M on 128 A100 and 384 V100"
    reached = {name: each for name, each in alone.items() if not isinstance(each, str)}
    beside = "; ".join(
        f"{name}: {each if isinstance(each, str) else seconds_text(each.seconds)}"
        for name, each in alone.items()
    )
    target = "<= 10 s (Sailor 10.8 s), quicker than either kind alone"
    if isinstance(whole, str):
        return [Finding(what, target, f"no strategy in {took:.1f} s: {whole}", False, beside)]
    best = next(each for each in whole.tried if each.outcome == "best")
    quickest = min((each.seconds for each in reached.values()), default=float("inf"))
    held = took <= 1.05 * MOST and whole.seconds < quickest
    told = f"{took:.1f} s: {best.name} {seconds_text(whole.seconds)}; {beside}"
    figures = {
        "search_seconds": took,
        "found": whole.seconds,
        "alone": {name: each.seconds for name, each in reached.items()},
        "planned": len(whole.tried),
    }
    why = "" if held else f"{len(whole.tried)} planned; " + _left(whole)
    return [Finding(what, target, told, held, why, figures)]


def _left(found: weft.SearchResult) -> str:
    return ", ".join(f"{count} {why}" for why, count in found.skipped.items() if count)


def _searched(step: object, topology: str, seconds: float) -> weft.SearchResult | str:
    try:
        return weft.search(step, topology, seconds=seconds, fixed=NARROW)  # type: ignore[arg-type]
    except UserError as error:
        return str(error)[:160]
