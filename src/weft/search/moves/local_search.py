"""The local search: descent of the best, chains from several starts, and the proof that no move improves what is left.

A chain moves as Metropolis does (Jia, Zaharia and Aiken, arXiv 1807.05358, section 5), at a temperature that is a part
of the best step. The number that decides is drawn first: it says how long a step may take to be kept, so that a
move whose bound is above that is not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations, islice
from math import log
from random import Random
from typing import final

from weft.search.evaluation.measures import Measures
from weft.search.moves.neighbours import Moves, Neighbours
from weft.search.moves.sequences import StrategyMove
from weft.search.pace import Pace
from weft.search.space.fixed import fits, hand_only
from weft.search.space.point import Point
from weft.search.state import SearchState
from weft.strategy.strategy import Strategy
from weft.units import Seconds

# All of these are chosen by hand. With them the local search ends at the optimum of small graphs in 100 of 100 seeds
# (`benchmarks/search/truth.py`); no measurement of other values is kept.
#
# The part of the best step by which another may be longer and is kept with a probability of 1 / e.
TEMPERATURE = 0.02
# So many moves after which a chain has found nothing quicker, and it ends.
PATIENCE = 40
# So many rounds of chains without a quicker strategy, and the search ends: one, for the starts of the next are mostly
# the same.
ROUNDS = 1
# A chain whose best is longer than that of all by this part is not worth a descent: five times the temperature, so
# that a few moves that were kept do not rule it out.
NEAR = 0.1
# The quickest with stages where the best has none, or without where it has some, is worth one up to this part more:
# where a simulation errs about one of these, it errs about all of them. It has erred by as much: a plan took
# 170 ms in place of 115 on one host.
NEAR_STAGED = 0.5
# So many cuts into stages of a best without any are looked at for that, where no pipeline was planned: each is a plan,
# and only one of them has to be near.
CUTS = 8
# Pairs of moves are tried where there are at most so many: those of 245 moves, for proofs on small graphs.
PAIRS = 30_000
# So many of the next moves are planned ahead at most: more than twice as many as there are planners, since some change
# nothing.
AHEAD = 16


def improve(
    state: SearchState,
    seed: int,
    neighbours: Moves | None = None,
) -> None:
    """Try moves from the best strategy and from others, as long as the budget lasts.

    Args:
        state: of the search; what is quicker is kept there, and what is known of moves from the best.
        seed: of what is drawn.
        neighbours: the moves; by default all.
    """
    if state.best is None:
        return
    if not Pace(state).affords():
        return
    search = LocalSearch(state, Random(seed), neighbours)
    search.descend_with_and_without_stages()
    search.chains()
    state.locality = search.proven()


@final
class LocalSearch:
    """Moves from strategy to strategy, within the budget of a search.

    Args:
        state: of the search.
        random: draws moves.
        neighbours: the moves; by default all.
    """

    def __init__(
        self,
        state: SearchState,
        random: Random,
        neighbours: Moves | None = None,
    ) -> None:
        self._state, self._pace, self._random = state, Pace(state), random
        self._neighbours = neighbours or Neighbours(state)
        self._reached = Strategy()
        # Of what moves go on from.
        self._name = ""

    @property
    def best(self) -> tuple[Strategy, Measures]:
        """The best so far."""
        assert self._state.best is not None
        _, strategy, measures = self._state.best
        return strategy, measures

    @property
    def _best_name(self) -> str:
        assert self._state.best is not None
        return self._state.best[0]

    def descend_with_and_without_stages(self) -> None:
        """Descend from the best, and in half of the time from the quickest with stages, or without, as it has not."""
        other = self._state.best_staged_otherwise() or self._quickest_cut()
        if other is None or other[2].seconds > (1 + NEAR_STAGED) * self.best[1].seconds:
            self.descend(self._best_name, *self.best)
            return
        with self._pace.until_half():
            self.descend(self._best_name, *self.best)
        name, strategy, measures = other
        self.descend(name, strategy, measures)
        # A move stands among what was tried where it is the best of all only.
        self._state.plan(f"{name}; improved", self._reached)

    def _quickest_cut(self) -> tuple[str, Strategy, Measures] | None:
        """The quickest of some cuts of the best into stages, without its signatures: they are of calls on all ranks."""
        strategy, here = self.best
        bare = replace(strategy, signatures=self._state.facts.base.signatures)
        if strategy.stages:
            return None
        found, self._name = [], self._best_name
        for change in islice(self._neighbours.cuts(bare), CUTS):
            if not self._pace.affords():
                break
            other = change.on(bare)
            measures = self._tried(change, other, Seconds((1 + NEAR_STAGED) * here.seconds))
            if measures is not None:
                found.append((self._named(change), other, measures))
        return min(found, key=lambda each: each[2].seconds, default=None)

    def descend(self, name: str, strategy: Strategy, here: Measures) -> bool:
        """Take moves that make a step quicker, until none of all does.

        Args:
            name: of the strategy.
            strategy: that is moved from.
            here: what it takes.

        Returns:
            False where the budget ended before.
        """
        self._name = name
        with self._state.in_chain("descent"):
            return self._descended(strategy, here)

    def _descended(self, strategy: Strategy, here: Measures) -> bool:
        changes, place, failed = self._neighbours.every(strategy), 0, 0
        self._reached = strategy
        while failed < len(changes):
            change = changes[place % len(changes)]
            place, failed = place + 1, failed + 1
            other = change.on(strategy)
            if other == strategy:
                continue
            if not self._pace.affords():
                return False
            self._ahead(changes, place, strategy, here.seconds)
            measures = self._tried(change, other, here.seconds)
            if measures is not None and measures.seconds < here.seconds:
                strategy, here = other, measures
                self._reached = strategy
                changes, failed = self._neighbours.every(strategy), 0
        return True

    def chains(self) -> None:
        """A chain from each start, and descents from what they find; once more where something was found."""
        quiet = 0
        while quiet < ROUNDS and self._pace.affords():
            before = self.best[1].seconds
            for name, strategy in starts(self._state, self._neighbours, self._random):
                self._chain(name, strategy)
                if not self._pace.affords():
                    return
            quiet = quiet + 1 if self.best[1].seconds >= before else 0

    def _chain(self, name: str, strategy: Strategy) -> None:
        """Metropolis from a strategy; then a descent from the best of the chain, where that is near the best of all."""
        self._name = name
        with self._state.in_chain("chain"):
            own = self._drawn(strategy)
        if own is not None and own[1].seconds <= (1 + NEAR) * self.best[1].seconds:
            self.descend(name, *own)

    def _drawn(self, strategy: Strategy) -> tuple[Strategy, Measures] | None:
        """The best of a chain; None where its start has no room."""
        here = self._tried(StrategyMove("start of a chain", _same), strategy, Seconds(float("inf")))
        if here is None:
            return None
        own, since = (strategy, here), 0
        while since < PATIENCE and self._pace.affords():
            since += 1
            change = self._neighbours.drawn(self._random, strategy)
            most = self._kept_up_to(here.seconds, self._random)
            other = change.on(strategy)
            if other == strategy:
                continue
            self._draw_ahead(strategy, here)
            measures = self._tried(change, other, most)
            if measures is None:
                continue
            strategy, here = other, measures
            if here.seconds < own[1].seconds:
                own, since = (strategy, here), 0
        return own

    def _ahead(
        self, changes: Sequence[StrategyMove], place: int, strategy: Strategy, most: Seconds
    ) -> None:
        """Have the changes from that place on planned by other processes, as long as one has time."""
        for number in range(place, place + min(AHEAD, len(changes))):
            other = changes[number % len(changes)].on(strategy)
            if other != strategy and not self._state.evaluator.ahead(other, most):
                return

    def _draw_ahead(self, strategy: Strategy, here: Measures) -> None:
        """Have what a chain draws next planned by other processes, as it is drawn if the chain stays where it is."""
        random = Random()
        random.setstate(self._random.getstate())
        for _ in range(AHEAD):
            change = self._neighbours.drawn(random, strategy)
            most = self._kept_up_to(here.seconds, random)
            other = change.on(strategy)
            if other != strategy and not self._state.evaluator.ahead(other, most):
                return

    def _kept_up_to(self, here: Seconds, random: Random) -> Seconds:
        """Seconds up to which the next step is kept: Metropolis, with the number drawn first."""
        drawn = 1.0 - random.random()
        return Seconds(here - TEMPERATURE * self.best[1].seconds * log(drawn))

    def _tried(self, change: StrategyMove, strategy: Strategy, most: Seconds) -> Measures | None:
        """The measures of a strategy; None where it is refused, takes longer than it may, or has no room."""
        found = self._state.move(self._named(change), strategy, most)
        self._state.tell()
        return found if self._state.fits(found) and found.seconds <= most else None

    def _named(self, change: StrategyMove) -> str:
        """The name of what a change leads to from where moves go on: the last change stands for all."""
        return f"{self._name.partition('; ')[0]}; {change.name}"

    def proven(self) -> str:
        """Knowledge of moves from the best, in words; descends where one is quicker after all."""
        while True:
            before = str(self.best[0])
            if not self.descend(self._best_name, *self.best):
                return f"not all of {len(self._neighbours.every(self.best[0]))} single moves from the best were tried"
            if str(self.best[0]) != before:
                continue
            said = self._pairs()
            if str(self.best[0]) == before:
                return said

    def _pairs(self) -> str:
        """All pairs of moves from the best, where they are few; ends where one is quicker."""
        strategy, here = self.best
        changes = [
            each for each in self._neighbours.every(strategy) if each.on(strategy) != strategy
        ]
        said = f"none of {len(changes)} single moves from the best is quicker"
        count = len(changes) * (len(changes) - 1) // 2
        if count > PAIRS:
            return f"{said}; pairs were not tried"
        for one, two in combinations(changes, 2):
            other = two.on(one.on(strategy))
            if not self._pace.affords():
                return f"{said}; not all of {count} pairs were tried"
            change = StrategyMove(f"{one.name}, {two.name}", _same)
            measures = self._tried(change, other, here.seconds)
            if measures is not None and measures.seconds < here.seconds:
                return said
        return f"{said}, nor any of {count} pairs"


def _same(strategy: Strategy) -> Strategy:
    return strategy


# Random moves away from the best; chosen by hand, so that a descent does not lead straight back.
FAR = 6


def starts(state: SearchState, neighbours: Moves, random: Random) -> Iterator[tuple[str, Strategy]]:
    """A strategy for each chain of a round, and its name: those that keep what is fixed.

    Args:
        state: of the search.
        neighbours: the moves.
        random: draws those away from the best.
    """
    assert state.best is not None
    name, strategy, _ = state.best
    yield name, strategy
    additive = state.additive()
    if additive is not None:
        yield name, additive.cheapest
    yield from _by_hand(state)
    name, strategy, _ = state.best
    for _ in range(FAR):
        strategy = neighbours.drawn(random, strategy).on(strategy)
    yield name, strategy


def _by_hand(state: SearchState) -> Iterator[tuple[str, Strategy]]:
    """On all ranks: data parallel, layers split, fully sharded."""
    facts, ranks = state.facts, len(state.evaluator.ranks)
    if hand_only(facts.base) or ranks == 1:
        return
    points = [Point(ranks)] if facts.samples >= ranks else []
    if facts.linears.rows:
        points.append(Point(1, ranks, layouts="columns"))
    points += [Point(ranks, zero=3)] if points and points[0].data == ranks else []
    for point in points:
        if fits(point, facts.base):
            yield str(point), state.strategy(point)
