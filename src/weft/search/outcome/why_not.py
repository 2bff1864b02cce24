"""The table "why not" of strategies that people write by hand: of each kind the best known, and what it loses by."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from weft.search.evaluation.measures import Measures, Refused
from weft.search.outcome.terms import loses_by, too_much
from weft.search.space import Point
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
        estimated: gives the measures of a point that was looked at; None for others.
        least: seconds that a point takes at least.
        held: bytes that a point takes at least.
        limit: bytes of memory; None where it is not known.
    """

    simulated: Mapping[Point, Measures | Refused]
    estimated: Callable[[Point], Measures | None]
    least: Callable[[Point], Seconds]
    held: Callable[[Point], Bytes]
    limit: int | None


def why_not(points: Iterable[Point], best: Measures, sources: Sources) -> tuple[WhyNot, ...]:
    """The rows of all kinds that these points have.

    Args:
        points: that people write by hand.
        best: the figures of the best strategy.
        sources: of figures.
    """
    kinds: dict[str, list[WhyNot]] = {}
    for point in points:
        kinds.setdefault(kind_of(point), []).append(_row(point, best, sources))
    return tuple(min(kinds[kind], key=_place(sources.limit)) for kind in sorted(kinds, key=_order))


def kind_of(point: Point) -> str:
    """The kind of a strategy that people write by hand."""
    if point.stages > 1:
        return {"gpipe": "GPipe", "1f1b": "1F1B", "zero_bubble": "zero bubble"}[point.schedule]
    if point.layouts != "data":
        return "Megatron grid"
    return f"ZeRO {point.zero}" if point.zero else "data parallel"


_ORDER = (
    *("data parallel", "ZeRO 1", "ZeRO 2", "ZeRO 3"),
    *("Megatron grid", "GPipe", "1F1B", "zero bubble"),
)


def _order(kind: str) -> int:
    return _ORDER.index(kind)


def _row(point: Point, best: Measures, sources: Sources) -> WhyNot:
    found, known = sources.simulated.get(point), "simulated"
    if not isinstance(found, Measures):
        found, known = sources.estimated(point), "estimated"
    if isinstance(found, Measures):
        over = too_much(found.memory, sources.limit)
        slower = found.seconds > best.seconds
        why = over or (loses_by(found, best) if slower else "")
        return WhyNot(kind_of(point), str(point), known, found.seconds, found.memory, why)  # type: ignore[arg-type]
    held, least = sources.held(point), sources.least(point)
    why = too_much(held, sources.limit)
    if not why:
        why = "no quicker, whatever its plan" if least >= best.seconds else "not reached in time"
    return WhyNot(kind_of(point), str(point), "at least", least, held, why)


def _place(limit: int | None) -> Callable[[WhyNot], tuple[bool, bool, float]]:
    """The best of a kind: that has room, of those that are known, the quickest."""

    def place(row: WhyNot) -> tuple[bool, bool, float]:
        fits = limit is None or row.memory <= limit
        return not fits, row.known == "at least", row.seconds if fits else row.memory

    return place
