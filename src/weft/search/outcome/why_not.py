"""The table "why not" of strategies that people write by hand: of each kind the best known, and what it loses by."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, TypeAlias, final

import numpy as np

from weft.search.evaluation.measures import Measures, Refused
from weft.search.outcome.terms import loses_by, too_much
from weft.search.space.kinds import KINDS, kinds_of
from weft.search.space.point import Point
from weft.search.space.points import Floats, Points
from weft.units import Bytes, Seconds

# How well the figures are known: of the whole plan; on a line through plans of few blocks; no plan takes less.
Known: TypeAlias = Literal["simulated", "estimated", "at least"]


@final
@dataclass(frozen=True)
class WhyNot:
    """A kind of strategy that people write by hand, by the best of it that is known.

    Attributes:
        kind: "data parallel", "ZeRO 1", "Megatron grid", "1F1B", …
        name: of the strategy, in words.
        known: how its figures are known.
        seconds: of a step.
        memory: bytes on the rank with the least room, with what its device reserves.
        why: the term that loses against the best; "" where none does.
    """

    kind: str
    name: str
    known: Known
    seconds: Seconds
    memory: Bytes
    why: str

    def __str__(self) -> str:
        took = f"{1e3 * self.seconds:.3f} ms"
        return (
            f"{self.kind:<14} {self.name:<44} {took:>14} {self.memory / 1e9:>8.2f} GB  {self.known:<9}  {self.why}"
        ).rstrip()


@final
@dataclass(frozen=True)
class Sources:
    """The sources of figures of points.

    Attributes:
        simulated: points that were planned.
        looked_at: points without stages that were looked at.
        estimated: gives the measures of a point that was looked at; None for others.
        least: seconds that points take at least.
        held: bytes that points take at least.
        limit: bytes of memory; None where it is not known.
    """

    simulated: Mapping[Point, Measures | Refused]
    looked_at: Collection[Point]
    estimated: Callable[[Point], Measures | None]
    least: Callable[[Points], Floats]
    held: Callable[[Points], Floats]
    limit: int | None


def why_not(points: Points, best: Measures, sources: Sources) -> tuple[WhyNot, ...]:
    """The rows of all kinds that these points have.

    Args:
        points: that people write by hand.
        best: the figures of the best strategy.
        sources: of figures.
    """
    kinds = kinds_of(points)
    every = ((kind, points.where(kinds == number)) for number, kind in enumerate(KINDS))
    return tuple(_of_kind(kind, own, best, sources) for kind, own in every if len(own))


def _of_kind(kind: str, points: Points, best: Measures, sources: Sources) -> WhyNot:
    """The best of a kind: that has room, of those that are known, the quickest."""
    known = [point for point in sources.simulated if points.has(point)]
    flat = [points.where(points.flat_as(each)) for each in sources.looked_at]
    known += [point for each in flat for point in each]
    rows = {point: _known(kind, point, best, sources) for point in dict.fromkeys(known)}
    found = [row for row in rows.values() if row is not None]
    rest = points.without([point for point, row in rows.items() if row is not None])
    found += [_at_least(kind, rest, best, sources)] if len(rest) else []
    return min(found, key=_place(sources.limit))


def _known(kind: str, point: Point, best: Measures, sources: Sources) -> WhyNot | None:
    found, known = sources.simulated.get(point), "simulated"
    if not isinstance(found, Measures):
        found, known = sources.estimated(point), "estimated"
    if not isinstance(found, Measures):
        return None
    over = too_much(found.memory, sources.limit)
    slower = found.seconds > best.seconds
    why = over or (loses_by(found, best) if slower else "")
    return WhyNot(kind, str(point), known, found.seconds, found.memory, why)  # type: ignore[arg-type]


def _at_least(kind: str, points: Points, best: Measures, sources: Sources) -> WhyNot:
    """The one that is not ruled out, or rules out all: of those that may have room the quickest."""
    least, held = sources.least(points), sources.held(points)
    over = held > (inf if sources.limit is None else sources.limit)
    number = int(np.lexsort((np.where(over, held, least), over))[0])
    seconds, memory = Seconds(float(least[number])), Bytes(int(held[number]))
    why = too_much(memory, sources.limit)
    if not why:
        why = "no quicker, whatever its plan" if seconds >= best.seconds else "not reached"
    return WhyNot(kind, str(points.point(number)), "at least", seconds, memory, why)


def _place(limit: int | None) -> Callable[[WhyNot], tuple[bool, bool, float]]:
    def place(row: WhyNot) -> tuple[bool, bool, float]:
        fits = limit is None or row.memory <= limit
        return not fits, row.known == "at least", row.seconds if fits else row.memory

    return place
