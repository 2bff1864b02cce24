"""Moves of placements: a part of the model gets its own ranks, or a stage is split in two.

Moves with the largest gain come first. The gain is the saved bytes of gradients, less the new bytes
of activations, less the bytes that could be sent while ranks work or wait alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import final

from weft.layout import Placement
from weft.patterns import around, covers, matches
from weft.search.moves.sequences import StrategyMove
from weft.search.steps.parts import ModelPart, Parts
from weft.strategy.parts import Stage
from weft.strategy.strategy import Strategy

# Parts that are looked at, those of the most worth on half of the ranks; and moves.
MOST_PARTS, MOST = 24, 64
# Places at which a stage becomes two: those nearest to the middle of its work.
_CUTS = 3


def _move(worth: float, name: str, stages: Sequence[Stage], micro_batches: int) -> StrategyMove:
    cut = f", {micro_batches} micro-batches" if micro_batches > 1 else ""
    return StrategyMove(name + cut, partial(with_stages, stages, micro_batches), worth)


def with_stages(stages: Sequence[Stage], micro_batches: int, strategy: Strategy) -> Strategy:
    """A strategy with other stages; one stage is none, on the grid of its ranks."""
    changed = replace(strategy, micro_batches=micro_batches)
    if len(stages) == 1:
        return replace(changed, stages=(), grid=stages[0].placement.shape)
    return replace(changed, stages=tuple(stages), grid=())


@final
@dataclass(frozen=True)
class PlacementMoves:
    """The placement moves from one strategy.

    Attributes:
        parts: of the model.
        stages: of the strategy, each with its units; one of all units where it has none.
        micro_batches: numbers that the strategy may have after a move, its own first.
    """

    parts: Parts
    stages: tuple[Stage, ...]
    micro_batches: tuple[int, ...]

    def best(self) -> list[StrategyMove]:
        """The moves of the most worth, in this order."""
        found = [*self._of_parts(), *self._cuts()]
        return sorted(found, key=lambda each: -each.worth)[:MOST]

    def _of_parts(self) -> Iterator[StrategyMove]:
        held = [(part, number) for part in self.parts.every for number in self._holders(part)]

        def worth(part: ModelPart, number: int) -> float:
            every = len(self.stages[number].placement.ranks)
            return _worth(part, every, (every + 1) // 2) - part.work

        held.sort(key=lambda each: worth(*each), reverse=True)
        for part, number in held[:MOST_PARTS]:
            yield from self._on_some(part, number)
            yield from self._alone(part, number)

    def _holders(self, part: ModelPart) -> Iterator[int]:
        """The stage that a part is in, where there is one and it holds more."""
        stages = enumerate(self.stages)
        found = [n for n, stage in stages if any(_meet(part, path) for path in stage.patterns)]
        if len(found) == 1 and not all(_holds(part, p) for p in self.stages[found[0]].patterns):
            yield found[0]

    def _on_some(self, part: ModelPart, number: int) -> Iterator[StrategyMove]:
        """A part on some ranks of its stage, neighbours or far apart; all of them still do the rest."""
        every = self.stages[number].placement
        count = row_count(every)
        for size in sorted({1, count // 4, count // 2, count} - {0}):
            for rows in dict.fromkeys((range(size), range(0, count, count // size)[:size])):
                own = some_rows(every, rows)
                waits = part.work * (count / size - 1)
                worth = _worth(part, len(every.ranks), len(own.ranks)) - waits
                stages = self._with_own(part, number, own, every)
                yield _move(worth, f"{part} on {_text(own)}", stages, self.micro_batches[0])

    def _alone(self, part: ModelPart, number: int) -> Iterator[StrategyMove]:
        """A part on as many ranks as its work is of the whole; the rest of its stage leaves them."""
        every, held = self.stages[number].placement, self._work(self.stages[number].patterns)
        count = row_count(every)
        if count == 1:
            return
        size = min(max(round(count * part.work / held) if held else 1, 1), count - 1)
        own = some_rows(every, range(count - size, count))
        others = some_rows(every, range(count - size))
        stages = self._with_own(part, number, own, others)
        saved = _worth(part, len(every.ranks), len(own.ranks))
        for micro in self.micro_batches:
            mine, theirs = part.work / size, max(held - part.work, 0.0) / (count - size)
            worth = saved + held - count * _in_turn(mine, theirs, micro)
            yield _move(worth, f"{part} alone on {_text(own)}", stages, micro)

    def _with_own(
        self, part: ModelPart, number: int, own: Placement, others: Placement
    ) -> tuple[Stage, ...]:
        """The stages with one more, for the part: the first one where it is inside of a unit, else in its place.

        The first stage that names the module, or one around it, counts.
        """
        rest = [path for path in self.stages[number].patterns if not _holds(part, path)]
        stages = list(self.stages)
        stages[number] = Stage(rest, others)
        inside = any(_meet(part, path) for path in rest)
        units = self.parts.units
        firsts = [[units[path].first for path in each.patterns if path in units] for each in stages]
        before = sum(min(own, default=0) < part.first for own in firsts)
        stages.insert(0 if inside else before, Stage(part.patterns, own))
        return tuple(stages)

    def _cuts(self) -> Iterator[StrategyMove]:
        """A stage as two, each on half of its ranks: neighbours, or every second one."""
        for number, stage in enumerate(self.stages):
            count = row_count(stage.placement)
            for place in self._middle(stage) if count > 1 else ():
                for rows in dict.fromkeys((range(count // 2), range(0, count, 2))):
                    yield from self._cut(number, place, rows)

    def _middle(self, stage: Stage) -> list[int]:
        """Places between units that part their work about evenly; none where a stage has other patterns."""
        if not all(path in self.parts.units for path in stage.patterns):
            return []
        whole = self._work(stage.patterns)
        uneven = {
            place: abs(2 * self._work(stage.patterns[:place]) - whole)
            for place in range(1, len(stage.patterns))
        }
        return sorted(uneven, key=lambda place: uneven[place])[:_CUTS]

    def _cut(self, number: int, place: int, rows: Sequence[int]) -> Iterator[StrategyMove]:
        stage = self.stages[number]
        count = row_count(stage.placement)
        own, others = stage.patterns[:place], stage.patterns[place:]
        here = some_rows(stage.placement, rows)
        there = some_rows(stage.placement, [row for row in range(count) if row not in rows])
        two = Stage(own, here), Stage(others, there)
        stages = (*self.stages[:number], *two, *self.stages[number + 1 :])
        saved = len(stage.placement.ranks) * sum(
            self.parts.units[path].parameters for path in stage.patterns
        )
        name = f"{others[0]} and what follows on {_text(there)}"
        for micro in self.micro_batches:
            took = _in_turn(
                self._work(own) / len(rows), self._work(others) / (count - len(rows)), micro
            )
            yield _move(saved + self._work(stage.patterns) - count * took, name, stages, micro)

    def _work(self, patterns: Sequence[str]) -> float:
        units = self.parts.units
        return sum(units[path].work for path in patterns if path in units)


def _worth(part: ModelPart, every: int, here: int) -> float:
    """Bytes that a part's gradients need not be sent on fewer ranks, less those of what goes in and out of it there."""
    moved = part.moved * every / here if here < every else 0.0
    return 2.0 * part.parameters * (every - here) - moved


def _in_turn(one: float, other: float, micro_batches: int) -> float:
    """The time of two stages, each of which waits for the other's first micro-batch."""
    return max(one, other) + min(one, other) / micro_batches


def _meet(part: ModelPart, path: str) -> bool:
    """True if a module and a part have something in common."""
    inside = (matches(outer, path) for pattern in part.patterns for outer in around(pattern))
    return _holds(part, path) or any(inside)


def _holds(part: ModelPart, path: str) -> bool:
    return any(covers(pattern, path) for pattern in part.patterns)


def _text(placement: Placement) -> str:
    ranks = placement.ranks
    step = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if len(ranks) < 3:
        return f"rank{'s' if len(ranks) > 1 else ''} {' and '.join(map(str, ranks))}"
    apart = "" if step == 1 else f", {step} apart"
    return f"{len(ranks)} ranks from {ranks[0]}{apart}"


# Rows of a grid, along its first axis of several ranks.


def row_count(placement: Placement) -> int:
    """The number of rows of a grid; 1 without several ranks."""
    return placement.shape[_axis(placement)]


def some_rows(placement: Placement, rows: Sequence[int]) -> Placement:
    """The ranks of some rows of a grid, one at least."""
    axis = _axis(placement)
    inner = prod(placement.shape[axis + 1 :])
    ranks = [placement.ranks[row * inner + place] for row in rows for place in range(inner)]
    return _like(placement, axis, len(rows), ranks)


def joined_rows(one: Placement, other: Placement) -> Placement | None:
    """The ranks of both, in their order; None if their rows are not of the same shape."""
    axis = min(_axis(one), _axis(other))
    if one.axes != other.axes or one.shape[axis + 1 :] != other.shape[axis + 1 :]:
        return None
    blocks = _blocks(one, axis) | _blocks(other, axis)
    return _like(one, axis, len(blocks), [rank for block in sorted(blocks) for rank in block])


def _blocks(placement: Placement, axis: int) -> set[tuple[int, ...]]:
    inner, ranks = prod(placement.shape[axis + 1 :]), placement.ranks
    return {ranks[place : place + inner] for place in range(0, len(ranks), inner)}


def _axis(placement: Placement) -> int:
    return next((axis for axis, size in enumerate(placement.shape) if size > 1), 0)


def _like(placement: Placement, axis: int, count: int, ranks: Sequence[int]) -> Placement:
    shape = (*placement.shape[:axis], count, *placement.shape[axis + 1 :])
    return Placement(placement.device_type, shape, tuple(ranks))
