"""The losses of a single device, which those of every system must match."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.crew import SystemFailure, crew_of
from benchmarks.systems import plain
from benchmarks.systems.system import Job

# Steps whose losses are compared.
CHECKED = 3
# A loss may differ from the reference by this part of the way that the reference went.
TOLERANCE = 0.01

# By whether the parts of a batch have statistics of their own (BatchNorm).
References = Mapping[bool, Sequence[float]]


def reference_losses(job: Job, timeout: float, kept: Path | None = None) -> References:
    """The first losses of a single device.

    Args:
        job: whose work is trained.
        timeout: seconds that an answer may take.
        kept: a file that keeps them by work, for other strategies.
    """
    known = json.loads(kept.read_text()) if kept and kept.exists() else {}
    if job.name not in known:
        known[job.name] = found(job, timeout)
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(json.dumps(known))
    whole, parted = known[job.name]
    return {False: whole, True: parted}


def found(job: Job, timeout: float) -> tuple[Sequence[float], Sequence[float]]:
    """With the statistics of the whole batch, and with those of each rank's part."""
    alone = Job(job.name, job.work, "single")
    whole = crew_of(plain.eager, alone, timeout, CHECKED)
    if not job.work.own_statistics:
        return whole, whole
    ranks = 2 if job.ranks == 1 else job.ranks  # a file may be asked for several
    return whole, crew_of(partial(plain.in_parts, parts=ranks), alone, timeout, CHECKED)


def check(losses: Sequence[float], reference: Sequence[float]) -> float:
    """The largest relative difference from the reference.

    Raises:
        SystemFailure: when a loss differs, seen beside how far the reference went.
    """
    differences = [abs(ours - right) for ours, right in zip(losses, reference, strict=True)]
    allowed = TOLERANCE * (max(reference) - min(reference))
    if not all(each <= allowed for each in differences):  # none is when one is no number
        raise SystemFailure(f"its losses are {losses}, those of a single device {reference}")
    return max(each / abs(right) for each, right in zip(differences, reference, strict=True))
