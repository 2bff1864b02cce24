"""A machine of two kinds of devices, searched whole and each kind alone."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import weft
from benchmarks.models import OPT_350M, gpt, stored
from benchmarks.search.trial import Finding, Searched, Trial, searched, seconds_text

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
    longer = max(seconds, MOST)
    alone = {each: searched(step, each, seconds=longer, fixed=NARROW) for each in ALONE}
    made = searched(step, str(WHOLE), seconds=MOST, fixed=NARROW)
    what = "OPT 350M on 128 A100 and 384 V100"
    reached = {
        name: each.result.seconds for name, each in alone.items() if isinstance(each, Searched)
    }
    beside = "; ".join(
        f"{name}: {seconds_text(reached[name]) if name in reached else each}"
        for name, each in alone.items()
    )
    target = "<= 10 s (Sailor 10.8 s), quicker than either kind alone"
    if isinstance(made, str):
        return [Finding(what, target, f"no strategy: {made}", False, beside)]
    whole = made.result
    held = made.took <= 1.05 * MOST and whole.seconds < min(reached.values(), default=float("inf"))
    figures = {
        "search_seconds": made.took,
        "found": whole.seconds,
        "alone": reached,
        "planned": len(whole.tried),
    }
    told, why = f"{made.took:.1f} s: {made}; {beside}", "" if held else made.left
    return [Finding(what, target, told, held, why, figures)]
