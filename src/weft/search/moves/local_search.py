"""The local search: descent from the best, Markov chains from several starts, and the proof that no move improves the
result.

A chain moves as Metropolis does (Jia, Zaharia and Aiken, arXiv 1807.05358, section 5), at a temperature that is a part
of the best step. The random number is drawn first: it gives the longest step that is accepted, so that a
move with a larger bound is not simulated.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import combinations, islice
from math import inf, log
from random import Random
from typing import final

from weft.search.candidate import Candidate
from weft.search.measures import Measures
from weft.search.moves.neighbours import Moves, Neighbours
from weft.search.moves.sequences import StrategyMove
from weft.search.space import fits, is_planned_as_is
from weft.search.state import Best, SearchState
from weft.search.tuning import NEAR_STAGED, PATIENCE, TEMPERATURE
from weft.strategy.strategy import Strategy
from weft.units import Seconds

# What a search can afford, whatever it finds: cuts of a best without stages that are looked at, each of them a plan;
# pairs of moves for a proof (those of 245 moves); moves that are planned ahead, more than twice as many as there are
# planners, since some change nothing; random moves away from the best, so that a descent does not lead straight back.
CUTS, PAIRS, AHEAD, AWAY = 8, 30_000, 16, 6


def improve(state: SearchState, seed: int, neighbours: Moves | None = None) -> None:
    """Try moves from the best strategy and from others, as long as the budget lasts.

    Args:
        state: of the search; what is faster is kept there, and what is known of moves from the best.
        seed: of the random choices.
        neighbours: the moves; by default all.
    """
    if state.log.best is None or not state.affords():
        return
    search = LocalSearch(state, Random(seed), neighbours or Neighbours(state))
    search.descend_with_and_without_stages()
    search.chains()
    state.log.locality = search.proven()


@final
class LocalSearch:
    """Moves from strategy to strategy, within the budget of a search."""

    def __init__(self, state: SearchState, random: Random, neighbours: Moves) -> None:
        self._state, self._random, self._neighbours = state, random, neighbours
        # For what moves continue from.
        self._name = ""

    @property
    def best(self) -> Best:
        """The best so far."""
        assert self._state.log.best is not None
        return self._state.log.best

    def descend_with_and_without_stages(self) -> None:
        """Descend from the best, and in half of the time from the fastest with stages, or without, as it has not."""
        best = self.best
        other = self._state.log.best_staged_otherwise(best) or self._quickest_cut()
        if other is None or other.measures.seconds > (1 + NEAR_STAGED) * best.measures.seconds:
            self.descend(best.name, best.strategy, best.measures)
            return
        with self._state.until_half():
            self.descend(best.name, best.strategy, best.measures)
        reached, _ = self.descend(other.name, other.strategy, other.measures)
        # A move stands among what was tried where it is the best of all only.
        self._state.log.plan(f"{other.name}; improved", reached)

    def _quickest_cut(self) -> Best | None:
        """The fastest of some cuts of the best into stages, without its signatures: they are of calls on all ranks."""
        best, found = self.best, list[Best]()
        bare = replace(best.strategy, signatures=self._state.facts.base.signatures)
        if bare.stages:
            return None
        self._name = best.name
        for change in islice(self._neighbours.cuts(bare), CUTS):
            if not self._state.affords():
                break
            other = change.on(bare)
            most = Seconds((1 + NEAR_STAGED) * best.measures.seconds)
            measures = self._tried(change.name, other, most)
            if measures is not None:
                found.append(Best(self._named(change.name), other, measures))
        return min(found, key=lambda each: each.measures.seconds, default=None)

    def descend(self, name: str, strategy: Strategy, here: Measures) -> tuple[Strategy, bool]:
        """Take moves that make a step faster, until no move does.

        Returns:
            The final strategy; false if the budget ended before.
        """
        self._name = name
        with self._state.log.in_chain("descent"):
            changes, place, failed = self._neighbours.every(strategy), 0, 0
            while failed < len(changes):
                change = changes[place % len(changes)]
                place, failed = place + 1, failed + 1
                other = change.on(strategy)
                if other == strategy:
                    continue
                if not self._state.affords():
                    return strategy, False
                several = range(place, place + min(AHEAD, len(changes)))
                following = (changes[number % len(changes)].on(strategy) for number in several)
                self._ahead(strategy, ((each, here.seconds) for each in following))
                measures = self._tried(change.name, other, here.seconds)
                if measures is not None and measures.seconds < here.seconds:
                    strategy, here = other, measures
                    changes, failed = self._neighbours.every(strategy), 0
            return strategy, True

    def chains(self) -> None:
        """A chain from each start, and descents from what they find near the best; again where one is faster."""
        before = Seconds(inf)
        while self.best.measures.seconds < before and self._state.affords():
            before = self.best.measures.seconds
            for name, strategy in self._starts():
                self._name = name
                with self._state.log.in_chain("chain"):
                    own = self._drawn(strategy)
                # Five times the temperature, so that a few moves that were kept do not rule it out.
                near = (1 + 5 * TEMPERATURE) * self.best.measures.seconds
                if own is not None and own[1].seconds <= near:
                    self.descend(name, *own)
                if not self._state.affords():
                    return

    def _drawn(self, strategy: Strategy) -> tuple[Strategy, Measures] | None:
        """The best of a chain; None if its start has no room."""
        here = self._tried("start of a chain", strategy, Seconds(inf))
        if here is None:
            return None
        own, since = (strategy, here), 0
        while since < PATIENCE and self._state.affords():
            since += 1
            change, other, most = self._draw(self._random, strategy, here)
            if other == strategy:
                continue
            ahead = Random()
            ahead.setstate(self._random.getstate())
            # As they are drawn if the chain stays where it is.
            following = (self._draw(ahead, strategy, here)[1:] for _ in range(AHEAD))
            self._ahead(strategy, following)
            measures = self._tried(change.name, other, most)
            if measures is None:
                continue
            strategy, here = other, measures
            if here.seconds < own[1].seconds:
                own, since = (strategy, here), 0
        return own

    def _draw(
        self, random: Random, strategy: Strategy, here: Measures
    ) -> tuple[StrategyMove, Strategy, Seconds]:
        """A move, where it leads, and the seconds up to which that is kept: Metropolis, with the number drawn first."""
        change, drawn = self._neighbours.drawn(random, strategy), 1.0 - random.random()
        kept = here.seconds - TEMPERATURE * self.best.measures.seconds * log(drawn)
        return change, change.on(strategy), Seconds(kept)

    def _ahead(self, strategy: Strategy, following: Iterable[tuple[Strategy, Seconds]]) -> None:
        """Have what comes next planned by other processes, as long as one has time."""
        for other, most in following:
            if other != strategy and not self._state.evaluator.ahead(other, most):
                return

    def _tried(self, change: str, strategy: Strategy, most: Seconds) -> Measures | None:
        """The measures of a strategy; None if it is refused, takes longer than it may, or has no room."""
        found = self._state.log.move(self._named(change), strategy, most)
        self._state.tell()
        return found if self._state.log.fits(found) and found.seconds <= most else None

    def _named(self, change: str) -> str:
        """The name of what a change leads to from where moves continue: the last change stands for all."""
        return f"{self._name.partition('; ')[0]}; {change}"

    def proven(self) -> str:
        """Knowledge of moves from the best, in words; descends where one is faster after all."""
        while True:
            best = self.best
            _, ended = self.descend(best.name, best.strategy, best.measures)
            if not ended:
                count = len(self._neighbours.every(self.best.strategy))
                return f"not all of {count} single moves from the best were tried"
            if self.best is best:
                said = self._pairs()
                if self.best is best:
                    return said

    def _pairs(self) -> str:
        """All pairs of moves from the best, where they are few; ends where one is faster."""
        strategy, here = self.best.strategy, self.best.measures
        changes = [
            each for each in self._neighbours.every(strategy) if each.on(strategy) != strategy
        ]
        said = f"none of {len(changes)} single moves from the best is quicker"
        count = len(changes) * (len(changes) - 1) // 2
        if count > PAIRS:
            return f"{said}; pairs were not tried"
        for one, two in combinations(changes, 2):
            other = two.on(one.on(strategy))
            if not self._state.affords():
                return f"{said}; not all of {count} pairs were tried"
            measures = self._tried(f"{one.name}, {two.name}", other, here.seconds)
            if measures is not None and measures.seconds < here.seconds:
                return said
        return f"{said}, nor any of {count} pairs"

    def _starts(self) -> Iterator[tuple[str, Strategy]]:
        """A start for each chain of a round, with its name; each keeps the fixed entries.

        The best; the layouts that sum to the least; on all ranks data parallel, layers split and fully sharded; and
        some random moves away from the best.
        """
        state, facts = self._state, self._state.facts
        best, ranks = self.best, len(self._state.evaluator.ranks)
        yield best.name, best.strategy
        additive = state.additive(self.best)
        if additive is not None:
            yield best.name, additive.cheapest
        candidates = list[Candidate]()
        if not is_planned_as_is(facts.base) and ranks > 1:
            flat = facts.samples >= ranks
            candidates += [Candidate(ranks)] if flat else []
            candidates += [Candidate(1, ranks, layouts="columns")] if facts.linears.rows else []
            candidates += [Candidate(ranks, zero=3)] if flat else []
        for candidate in candidates:
            if fits(candidate, facts.base):
                yield str(candidate), state.strategy(candidate)
        name, strategy = self.best.name, self.best.strategy
        for _ in range(AWAY):
            strategy = self._neighbours.drawn(self._random, strategy).on(strategy)
        yield name, strategy
