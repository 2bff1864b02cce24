"""Rows of results: what was found about a system on a work with a strategy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import comb
from typing import Any

from benchmarks.systems.table import Entry

# The part of all repetitions whose interval holds the true median, if rounds do not depend on each other.
CONFIDENCE = 0.95


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> list[float] | None:
    """The least and the largest value that the median may have; None where there are too few values to say.

    Of n values as many lie below the true median as heads fall in n throws of a coin: between the k-th
    from below and the k-th from above it lies but for twice the odds of fewer than k heads (David and Nagaraja, Order
    Statistics, section 7.1). Six values are the fewest for 95 %.
    """
    ordered = sorted(values)
    size, odds, outside = len(ordered), 0.0, 0
    while outside < size:
        odds += comb(size, outside) / 2**size
        if 2 * odds > 1 - confidence:
            break
        outside += 1
    return [ordered[outside - 1], ordered[size - outside]] if outside else None


@dataclass(frozen=True)
class Found:
    """What a system showed.

    Attributes:
        entry: the system.
        seconds: of a step, in each round that counts.
        compile_seconds: to build it and run the first step, less a later step.
        warm_compile_seconds: the same again, with what the first time left on disk; weft only.
        peak_bytes: of the tensors of one rank.
        resident_bytes: of a rank's process at the peak of a step, beyond what it had before its system was built.
        loss_difference: largest relative difference from the reference; None for the limit.
        idle: the part of one core that one of its processes used while others had their turns.
        disturbed: rounds among them in which the machine did something else, too.
    """

    entry: Entry
    seconds: Sequence[float]
    compile_seconds: float
    warm_compile_seconds: float | None
    peak_bytes: int
    resident_bytes: int
    loss_difference: float | None
    idle: float
    disturbed: int = 0

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def rows(
    head: Mapping[str, Any], found: Sequence[Found], errors: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One row for each system, for those that failed too; ratios are medians over the rounds.

    Of several limits the lowest is the limit.

    Args:
        head: what all rows begin with: the work, the strategy, the link, the settings.
        found: of all systems that ran; some may have been left out after the first rounds.
        errors: of systems that did not, by name.
    """
    peers = [each for each in found if each.entry.kind == "peer"]
    limits = (each for each in found if each.entry.kind == "limit")
    limit = min(limits, key=lambda each: each.median, default=None)
    lines = [{**head, **row(each, limit, peers)} for each in found]
    return lines + [{**head, "system": name, "error": text} for name, text in errors.items()]


def row(each: Found, limit: Found | None, peers: Sequence[Found]) -> dict[str, Any]:
    # Over the limit: time by time; against a peer: speed by speed, so that more is better.
    over = ratios(each, limit) if limit and each is not limit else None
    against = peers if each.entry.kind == "own" else ()
    best = min(against, key=lambda peer: peer.median, default=None)
    faster = ratios(best, each) if best else None
    return {
        "system": each.entry.name,
        "seconds": each.median,
        "spread": quartiles(each.seconds),
        "interval": interval(each.seconds),
        "rounds": len(each.seconds),
        "disturbed": each.disturbed,
        "limit": limit.entry.name if limit and over else None,
        "ratio_to_limit": statistics.median(over) if over else None,
        "limit_interval": interval(over) if over else None,
        "best_peer": best.entry.name if best else None,
        "ratio_to_best_peer": statistics.median(faster) if faster else None,
        "ratio_spread": quartiles(faster) if faster else None,
        "ratio_interval": interval(faster) if faster else None,
        "against": {peer.entry.name: known(ratios(peer, each)) for peer in against},
        "compile_seconds": each.compile_seconds,
        "warm_compile_seconds": each.warm_compile_seconds,
        "peak_bytes": each.peak_bytes,
        "resident_bytes": each.resident_bytes,
        "losses_agree": each.loss_difference,
        "idle_cpu": each.idle,
        "raw": [round(seconds, 7) for seconds in each.seconds],
    }


def known(values: Sequence[float]) -> dict[str, Any]:
    """The median of some ratios, and its interval."""
    return {"ratio": statistics.median(values), "interval": interval(values)}


def ratios(over: Found, under: Found) -> list[float]:
    """Of the times of two systems, round by round, as far as both were timed."""
    return [ours / theirs for ours, theirs in zip(over.seconds, under.seconds, strict=False)]


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower and the upper one."""
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
