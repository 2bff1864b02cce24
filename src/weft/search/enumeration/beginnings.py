"""The beginning of a search: looks at one point of each kind, and at small ones; the cheapest layouts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import final

import numpy as np

from weft.ir.logical import Input
from weft.layout import split
from weft.search.bounds.additive import additive_part
from weft.search.enumeration.room import ABOUT, Fronts, Room
from weft.search.evaluation.measures import Measures
from weft.search.pace import Pace
from weft.search.space.fixed import fits
from weft.search.space.point import Point
from weft.search.space.points import Points, kinds_of
from weft.search.state import ADDED_UP, SearchState

# The part of the time that is left which the cheapest layouts of data parallel may take.
_CHEAPEST = 0.4
# So many points that take little memory are looked at before others, until one has room.
_SMALLEST = 3


@final
class Beginnings:
    """Looks at points, and plans some, before they are planned in their order."""

    def __init__(self, state: SearchState) -> None:
        self._state, self._pace = state, Pace(state)
        self._fronts, self._room = Fronts(state), Room(state)
        self._facts, self._estimates = state.facts, state.estimates

    def look_at_kinds(self) -> None:
        """Look at the best, by rough estimate, of each kind of strategy that people write by hand.

        By small steps where there are any, else by a plan of the whole. Where the quickest lacks room, at the one with
        blocks that run again, too.
        """
        self.look_at_smallest()
        if not self._looked_at_kinds():
            return
        if self._state.best is None and self._room.quickest_lacks_room():
            self._room.with_blocks_again()

    def _looked_at_kinds(self) -> bool:
        """Look at one point of each kind; false where time for a plan of the best would be spent on that."""
        front, budget = self._fronts.of(by_hand=True), self._state.budget
        plan = took = 0.0
        for point in self._quick_and_cheap(front.points):
            if not self._pace.affords() or (plan and not budget.has(plan + took)):
                return False
            if not self._pace.looks_in_time(point):
                continue
            begin = budget.now()
            if self._estimates.refined(point) is None and self._facts.small is None:
                self._fronts.plan(front, point)
            elif self._estimates.has_room(point):
                seconds = self._estimates.seconds_of_plan(point)
                plan = min(plan, seconds) if plan else seconds
            took = budget.now() - begin
        return True

    def _quick_and_cheap(self, points: Points) -> Iterator[Point]:
        """Of each kind the quickest, those without a tensor axis or stages first, whose ranks are alike.

        Of points about as quick, one of few micro-batches: it is planned quickly.
        """
        kinds, rough = kinds_of(points), self._estimates.rough(points)
        order = np.lexsort((rough, points.micro_batches))
        for kind in sorted(set(kinds.tolist())):
            quick = rough <= ABOUT * rough[kinds == kind].min()
            yield points.point(int(order[((kinds == kind) & quick)[order]][0]))

    def look_at_smallest(self) -> None:
        """Look at points that take the least memory of data parallel, where the quickest by hand lacks room.

        By small steps where there are any, until one has room; else by a plan of the whole of one.
        """
        if not self._room.quickest_lacks_room():
            return
        points = self._smallest()
        if self._facts.small is None or self._state.budget.moves < inf:
            self._plan_smallest(points)
            return
        for _ in range(_SMALLEST):
            if not len(points) or not self._pace.affords():
                return
            point = points.point(int(self._estimates.rough(points).argmin()))
            if not self._pace.looks_in_time(point):
                return
            self._estimates.seconds(point)
            if self._estimates.has_room(point):
                return
            points = points.without((point,))

    def _smallest(self) -> Points:
        """Of data parallel all of whose blocks run again, those on all ranks with ZeRO 3."""
        again = self._room.blocks_again()
        return again.where((again.zero == 3) & (again.data == again.data.max(initial=0)))

    def _plan_smallest(self, points: Points) -> None:
        """Plan the one with the fewest micro-batches that should have room, or with the most."""
        order = np.argsort(points.micro_batches, kind="stable") if len(points) else ()
        each = [points.point(int(number)) for number in order]
        small = (point for point in each if self._estimates.may_have_room(point))
        point = next(small, each[-1] if each else None)
        if point is not None and self._pace.affords():
            self._fronts.plan(self._fronts.of(by_hand=False), point)

    def plan_cheapest(self) -> None:
        """Plan the layouts that sum to the least on all ranks, and vocabularies split: no point says them.

        With nothing else. Where a pipeline is the best, its stages have few layouts, and moves from it lead there by
        many steps only.
        """
        ranks = len(self._state.evaluator.ranks)
        left = self._state.planned + sum(map(len, self._state.fronts))
        point = Point(ranks)
        if ranks == 1 or not left or not self._splits(point):
            return
        # What an earlier search has planned led it on from there, with something else fixed, too.
        if point in self._state.learned.points or not self._is_quickly_planned(point):
            return
        if self._pace.affords():
            self._fronts.plan(self._fronts.of(by_hand=True), point)
        if isinstance(self._state.points.get(point), Measures) and self._pace.affords():
            self._plan_with_vocabularies(point)
            self._plan_cheapest_of(point)

    def _plan_with_vocabularies(self, point: Point) -> None:
        """Plan a point of data parallel with tables, and the layer behind a loss, split by rows on its ranks."""
        parted = dict.fromkeys(self._vocabularies(point), split(0))
        if parted:
            strategy = self._state.strategy(point)
            laid = replace(strategy, parameters={**parted, **strategy.parameters})
            self._state.plan(f"{point}; vocabularies split", laid, by_hand=True)
            self._state.tell()

    def _vocabularies(self, point: Point) -> list[str]:
        """Vocabularies that the ranks of a point divide."""
        values = {node.key: node.value for node in self._facts.step.graph.of_kind(Input)}
        keys = self._facts.vocabularies
        return [key for key in keys if values[key].shape[0] % point.data == 0]

    def _plan_cheapest_of(self, point: Point) -> None:
        """Plan the cheapest layouts of a point that was planned."""
        strategy, evaluator = self._state.strategy(point), self._state.evaluator
        whole = evaluator.last(strategy) or evaluator.whole(strategy)
        added = additive_part(self._facts, strategy, whole.deduced)
        if added is not None:
            # Deduction may give the same signatures, and moves are free then to change what parameters hang on.
            bare = replace(added.cheapest, signatures=self._facts.base.signatures)
            self._state.plan(f"{point}; cheapest layouts", bare)
            self._state.plan(f"{point}; cheapest layouts, signatures fixed", added.cheapest)
            self._state.tell()

    def _splits(self, point: Point) -> bool:
        """True where each rank of a point has a sample, and what is fixed allows it."""
        return self._facts.samples >= point.data and fits(point, self._facts.base)

    def _is_quickly_planned(self, point: Point) -> bool:
        """True where plans of its layouts take a small part of the time, and a step of many blocks may have room."""
        if self._facts.small is not None and self._state.budget.moves == inf:
            room = bool(self._state.floors.may_fit(Points.one(point))[0])
            if not room or not self._pace.may_look() or self._estimates.refined(point) is None:
                return False
        plans = 2 + bool(self._vocabularies(point)) + (point not in self._state.points)
        soon = (plans + ADDED_UP) * self._estimates.seconds_of_plan(point)
        return self._state.budget.has(soon / _CHEAPEST)
