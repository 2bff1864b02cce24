"""The state of a search: what was planned, what is the best of it, and what is left."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from time import monotonic
from typing import final

from weft.errors import UserError
from weft.search.budget import Budget
from weft.search.evaluator import Evaluator, Measures, Refused
from weft.search.facts import StepFacts
from weft.search.floors import Floors
from weft.search.result import Outcome, SearchResult, Tried
from weft.search.space import Point
from weft.strategy.strategy import Strategy
from weft.units import Bytes, Seconds

SLOWER = "no quicker than the best, whatever their plans"
NO_ROOM = "take more memory than there is, whatever their plans"
NO_TIME = "not reached in time"


@final
class Enumeration:
    """Plans strategies one after the other, and keeps what comes out.

    Args:
        evaluator: plans and simulates.
        floors: of points.
        facts: of the step.
        budget: what may be spent.
    """

    def __init__(
        self, evaluator: Evaluator, floors: Floors, facts: StepFacts, budget: Budget
    ) -> None:
        self.evaluator, self.floors, self.facts, self.budget = evaluator, floors, facts, budget
        self.skipped = Counter[str]()
        self._tried: dict[str, tuple[str, Strategy, Measures | Refused, bool]] = {}
        self._best: tuple[Seconds, str] | None = None
        self._least = Seconds(float("inf"))
        self._longest = 0.0
        self._left = 0

    @property
    def planned(self) -> int:
        """The number of strategies that were planned."""
        return len(self._tried)

    @property
    def best(self) -> tuple[str, Strategy, Measures] | None:
        """The name of the quickest that fits, and what it takes; None so far."""
        if self._best is None:
            return None
        name, strategy, found, _ = self._tried[self._best[1]]
        assert isinstance(found, Measures)
        return name, strategy, found

    @property
    def bound(self) -> Seconds:
        """Seconds that any strategy of the space takes at least."""
        return min(self._least, self._best[0]) if self._best else self._least

    def affords(self) -> bool:
        """True where one more strategy may be planned: it takes as long as the longest so far, perhaps."""
        return self.budget.allows(self.planned, self._longest / 2)

    def plan(self, name: str, strategy: Strategy, by_hand: bool = False) -> Measures | Refused:
        """Plan and simulate a strategy, unless that was done."""
        key = str(strategy)
        if key in self._tried:
            return self._tried[key][2]
        begin = monotonic()
        found = self.evaluator.of(strategy)
        self._longest = max(self._longest, monotonic() - begin)
        self._tried[key] = name, strategy, found, by_hand
        if isinstance(found, Measures) and self._has_room(found.memory) and self._beats(found):
            self._best = found.seconds, key
        return found

    def _beats(self, found: Measures) -> bool:
        return self._best is None or found.seconds < self._best[0]

    def _has_room(self, memory: Bytes) -> bool:
        return self.floors.limit is None or memory <= self.floors.limit

    def ordered(self, points: Iterable[Point]) -> Iterator[Point]:
        """The points that may have room, those first that seem quickest; of equal ones what people write by hand."""
        found = []
        for point in points:
            if not self._has_room(self.floors.memory(point)):
                self.skipped[NO_ROOM] += 1
                continue
            self._least = min(self._least, self.floors.least(point))
            found.append(point)
        found.sort(key=lambda each: (self.floors.estimate(each), not each.by_hand, each))
        self._left = len(found)
        yield from found

    def try_point(self, point: Point) -> bool:
        """Plan a point, unless its floor says that it cannot be the best; false where the budget is spent."""
        if self._best is not None and self.floors.least(point) >= self._best[0]:
            self.skipped[SLOWER] += 1
            self._left -= 1
            return True
        if not self.affords() and (self._best is not None or self.budget.moves <= self.planned):
            self.skipped[NO_TIME] += self._left
            return False
        self._left -= 1
        strategy = point.strategy(self.facts.linears, self.facts.base, self._recomputed)
        self.plan(str(point), strategy, point.by_hand)
        return True

    @property
    def _recomputed(self) -> str:
        """The pattern of the modules that run again."""
        blocks = self.facts.blocks
        return f"{blocks.prefix}.*" if blocks is not None else "*"

    def result(self, not_searched: Sequence[str]) -> SearchResult:
        """The result of the search.

        Raises:
            UserError: no strategy that was planned fits.
        """
        if self._best is None:
            raise UserError(self._nothing_fits())
        strategy = self._named_best()[1]
        tried = sorted(self._rows(), key=_place)
        return SearchResult(
            strategy,
            self.evaluator.simulation(strategy),
            self.bound,
            tuple(tried),
            dict(self.skipped),
            not_searched,
        )

    def _named_best(self) -> tuple[str, Strategy, Measures]:
        best = self.best
        assert best is not None
        return best

    def _rows(self) -> Iterator[Tried]:
        _, _, least = self._named_best()
        best = self._best[1] if self._best else ""
        for key, (name, strategy, found, by_hand) in self._tried.items():
            if isinstance(found, Refused):
                yield Tried(name, strategy, "refused", None, None, found.why, by_hand)
                continue
            outcome: Outcome = "slower" if self._has_room(found.memory) else "does not fit"
            outcome = "best" if key == best else outcome
            why = self._why(outcome, found, least)
            yield Tried(name, strategy, outcome, found.seconds, found.memory, why, by_hand)

    def _why(self, outcome: Outcome, found: Measures, best: Measures) -> str:
        """The term that loses most against the best."""
        if outcome == "best":
            return ""
        if outcome == "does not fit":
            return f"{(found.memory - (self.floors.limit or 0)) / 1e9:.2f} GB too much"
        terms = {
            "computing": found.computing - best.computing,
            "exchanges that nothing hides": found.exposed - best.exposed,
            "waiting": found.idle - best.idle,
        }
        term = max(terms, key=lambda each: terms[each])
        return f"{1e3 * terms[term]:.3f} ms more {term}"

    def _nothing_fits(self) -> str:
        held = [
            (found.memory, name)
            for name, _, found, _ in self._tried.values()
            if isinstance(found, Measures)
        ]
        limit = f"{(self.floors.limit or 0) / 1e9:.2f} GB"
        if held:
            memory, name = min(held)
            return (
                f"weft.search: no strategy fits {limit} of memory; the least that was found is {memory / 1e9:.2f} GB "
                f"({name}): give a larger limit, more devices, or a smaller batch"
            )
        refused = [f.why for _, _, f, _ in self._tried.values() if isinstance(f, Refused)]
        if refused:
            return f"weft.search: no strategy can be planned; the first is refused so: {refused[0]}"
        return (
            f"weft.search: no strategy fits {limit} of memory: parameters and states alone take more, sharded over "
            "all devices; give a larger limit or more devices"
        )


def _place(tried: Tried) -> tuple[int, float, str]:
    order = {"best": 0, "slower": 1, "does not fit": 2, "refused": 3}
    return order[tried.outcome], tried.seconds or 0.0, tried.name
