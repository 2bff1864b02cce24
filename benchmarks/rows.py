"""Rows of results: what was found about a system on a work with a strategy."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.systems.table import Entry


@dataclass(frozen=True)
class Found:
    """What a system showed.

    Attributes:
        entry: the system.
        seconds: of a step, in each round.
        compile_seconds: to build it and run the first step, less a later step.
        warm_compile_seconds: the same again, with what the first time left on disk; weft only.
        peak_bytes: of the tensors of one rank.
        loss_difference: largest relative difference from the reference; None for the limit.
        idle: the part of one core that one of its processes used while others had their turns.
    """

    entry: Entry
    seconds: Sequence[float]
    compile_seconds: float
    warm_compile_seconds: float | None
    peak_bytes: int
    loss_difference: float | None
    idle: float

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def rows(
    head: Mapping[str, Any], found: Sequence[Found], errors: Mapping[str, str]
) -> list[dict[str, Any]]:
    """One row for each system, for those that failed too; ratios are medians over the rounds.

    Args:
        head: what all rows begin with: the work, the strategy, the link, the settings.
        found: of all systems that ran; some may have been left out after the first rounds.
        errors: of systems that did not, by name.
    """
    limits = [each for each in found if each.entry.kind == "limit"]
    peers = [each for each in found if each.entry.kind == "peer"]
    best = min(peers, key=lambda each: each.median, default=None)
    limit = limits[0] if limits else None
    lines = [{**head, **row(each, limit, best)} for each in found]
    return lines + [{**head, "system": name, "error": text} for name, text in errors.items()]


def row(each: Found, limit: Found | None, best: Found | None) -> dict[str, Any]:
    against = best if each.entry.kind == "own" else None
    # Over the limit: time by time; against a peer: speed by speed, so that more is better.
    over = ratios(each, limit) if limit and each is not limit else None
    faster = ratios(against, each) if against else None
    return {
        "system": each.entry.name,
        "seconds": each.median,
        "spread": quartiles(each.seconds),
        "rounds": len(each.seconds),
        "ratio_to_limit": statistics.median(over) if over else None,
        "best_peer": against.entry.name if against else None,
        "ratio_to_best_peer": statistics.median(faster) if faster else None,
        "ratio_spread": quartiles(faster) if faster else None,
        "compile_seconds": each.compile_seconds,
        "warm_compile_seconds": each.warm_compile_seconds,
        "peak_bytes": each.peak_bytes,
        "losses_agree": each.loss_difference,
        "idle_cpu": each.idle,
    }


def ratios(over: Found, under: Found) -> list[float]:
    """Of the times of two systems, round by round, as far as both were timed."""
    return [ours / theirs for ours, theirs in zip(over.seconds, under.seconds, strict=False)]


def quartiles(values: Sequence[float]) -> list[float]:
    """The lower and the upper one."""
    if len(values) < 2:
        return [values[0], values[0]]
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return [low, high]
