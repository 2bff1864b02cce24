"""The result of a search: the best strategy, a bound for all others, and why not each of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, TypeAlias, final

from weft.search.bounds.additive import AdditivePart
from weft.search.outcome.why_not import LookedAt, WhyNot
from weft.search.record.record import SearchRecord
from weft.simulator.results.simulation import Simulation
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

Outcome: TypeAlias = Literal["best", "slower", "does not fit", "refused"]
# Rows of the table of what was tried, as text.
_ROWS = 24


@final
@dataclass(frozen=True)
class Tried:
    """A strategy that was planned and simulated.

    Attributes:
        name: of the strategy, in words.
        strategy: as it was planned.
        outcome: what came of it.
        seconds: of a step; None where it was refused.
        memory: bytes on the rank with the least room, with what its device reserves; None where it was refused.
        why: the term that loses, or why it was refused.
        by_hand: true where people write such strategies without a search.
    """

    name: str
    strategy: Strategy
    outcome: Outcome
    seconds: Seconds | None
    memory: Bytes | None
    why: str = ""
    by_hand: bool = False

    def __str__(self) -> str:
        took = "" if self.seconds is None else f"{1e3 * self.seconds:.3f} ms"
        held = "" if self.memory is None else f"{self.memory / 1e9:.2f} GB"
        hand = "*" if self.by_hand else " "
        return (
            f"{hand} {self.name:<44} {took:>14} {held:>11}  {self.outcome:<12}  {self.why}".rstrip()
        )


@final
@dataclass(frozen=True)
class SearchResult:
    """The best strategy that was found, and all that was tried.

    Attributes:
        best: the strategy; `grid` says on how many ranks along each axis.
        simulation: of it, as `weft.simulate` gives it.
        bound: seconds that each strategy of the space takes at least; 0 where that is not known.
        tried: the strategies that were planned, the quickest that fit first.
        skipped: numbers of strategies that were not planned, by reason; and of moves that were refused, by the most
            frequent reasons.
        not_searched: dimensions that the space has not, in words.
        locality: which moves from the best were tried and are no quicker, in words.
        why: of each kind of strategy that people write by hand the best that is known, and what it loses by.
        additive: what calls and boxing of the best sum to beside the least of any layouts in its grid and stages; None
            where that cannot be said, or time did not suffice.
        course: all that was looked at, in its order.
        record: what the search learned, for the next one; with `save`.
    """

    best: Strategy
    simulation: Simulation
    bound: Seconds
    tried: tuple[Tried, ...]
    skipped: Mapping[str, int]
    not_searched: Sequence[str] = ()
    locality: str = ""
    why: tuple[WhyNot, ...] = ()
    additive: AdditivePart | None = None
    course: tuple[LookedAt, ...] = field(default=(), repr=False, compare=False)
    record: SearchRecord = field(kw_only=True, repr=False, compare=False)

    @property
    def seconds(self) -> Seconds:
        """Of a step with the best strategy."""
        return self.simulation.step_seconds

    @property
    def gap(self) -> float:
        """The part of the best by which a strategy of the space can be quicker at most."""
        return 1 - self.bound / self.seconds if self.seconds else 0.0

    def __str__(self) -> str:
        """The table of what was tried, and what was not."""
        best = next(each for each in self.tried if each.outcome == "best")
        lines = [
            f"best: {best.name}: {1e3 * self.seconds:.3f} ms a step",
            self._bound_text,
            *([f"layouts: {self.additive}"] if self.additive is not None else []),
            "",
            *map(str, self.tried[:_ROWS]),
        ]
        if len(self.tried) > _ROWS:
            lines.append(f"  and {len(self.tried) - _ROWS} more")
        lines.append("  (*: strategies that people write by hand)")
        lines += ["", "why not:", *(f"  {each}" for each in self.why), ""] if self.why else []
        lines += [f"moves: {self.locality}"] if self.locality else []
        lines += [f"not planned: {count}, {why}" for why, count in self.skipped.items() if count]
        lines += [f"not searched: {each}" for each in self.not_searched]
        return "\n".join(lines)

    @property
    def _bound_text(self) -> str:
        if not self.bound:
            return "bound: none is known where stages are fixed with their ranks"
        least = f"{1e3 * self.bound:.3f} ms"
        return f"bound: no strategy of the space takes less than {least}, {self.gap:.1%} below the best"

    def to_json(self) -> dict[str, Any]:
        """As dicts, lists, numbers and texts; seconds and bytes.

        Left out are the strategies themselves, the best among them, the course and the record; of the additive part
        there is its gap.
        """
        return {
            "simulation": self.simulation.to_json(),
            "bound": self.bound,
            "gap": self.gap,
            "additive_gap": None if self.additive is None else self.additive.gap,
            "tried": [
                {
                    "name": each.name,
                    "outcome": each.outcome,
                    "seconds": each.seconds,
                    "memory": each.memory,
                    "why": each.why,
                    "by_hand": each.by_hand,
                }
                for each in self.tried
            ],
            "skipped": dict(self.skipped),
            "not_searched": list(self.not_searched),
            "locality": self.locality,
            "why": [asdict(each) for each in self.why],
        }
