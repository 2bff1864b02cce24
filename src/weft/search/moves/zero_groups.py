"""Moves of ZeRO for one group of parameters: those of one place in all blocks, of all blocks, the rest, vectors.

A strategy says levels by patterns. Moves read the level of each place, change some, and write all anew in one form:
equal levels give equal strategies, whatever way led there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import final

from weft.cached import cached_property
from weft.ir.logical import Input, LogicalGraph
from weft.search.moves.groups import places_of
from weft.search.moves.strategy_move import StrategyMove
from weft.search.steps.repeated import Blocks
from weft.strategy.parts import Zero
from weft.strategy.sharding import Zeros, level_of, zero_axis, zero_rules
from weft.strategy.strategy import Strategy


@final
@dataclass(frozen=True)
class ZeroMoves:
    """The moves of ZeRO for groups of the parameters of a step.

    Attributes:
        graph: the step, as captured.
        blocks: that come again in it.
    """

    graph: LogicalGraph
    blocks: Blocks | None

    @cached_property
    def _shapes(self) -> Mapping[str, tuple[int, ...]]:
        inputs = self.graph.of_kind(Input)
        return {node.key: tuple(node.value.shape) for node in inputs if node.role == "parameter"}

    @cached_property
    def places(self) -> Mapping[str, Sequence[str]]:
        """The names of parameters that each pattern stands for: the same place in every block; the largest first."""
        found = places_of(self._shapes, self.blocks).items()
        return dict(sorted(found, key=lambda each: -sum(map(self._elements, each[1]))))

    def _elements(self, name: str) -> int:
        return prod(self._shapes[name])

    @cached_property
    def groups(self) -> Mapping[str, tuple[str, ...]]:
        """Places that change together, by a name of theirs: many at once first, then each alone; the largest first."""
        inside = tuple(place for place in self.places if place not in self._shapes)
        outside = tuple(place for place in self.places if place in self._shapes)
        vectors = tuple(p for p, names in self.places.items() if len(self._shapes[names[0]]) < 2)
        many = {"blocks": inside, "all outside of blocks": outside, "vectors": vectors}
        several = {name: own for name, own in many.items() if 1 < len(own) < len(self.places)}
        return {**several, **{place: (place,) for place in self.places}}

    def moves(self, strategy: Strategy, base: Strategy) -> Iterator[StrategyMove]:
        """Every other level of every group; where nothing is sharded, along each axis of several ranks.

        Args:
            strategy: to move from.
            base: entries that hold for every strategy.
        """
        if base.zero is not None or len(self.places) < 2:
            return
        known = zero_axis(strategy.zero)
        several = [axis for axis, ranks in enumerate(strategy.grid or (2,)) if ranks > 1]
        axes = several if known is None else [known]
        for name, places in self.groups.items():
            for axis in axes:
                for level in (0, 1, 2, 3):
                    # Without micro-batches, level 2 is level 1.
                    if level != 2 or strategy.micro_batches > 1:
                        words = f"ZeRO {level} along axis {axis} for {name}"
                        yield StrategyMove(words, partial(self._on, places, level, axis))

    def _on(self, places: Sequence[str], level: int, axis: int, strategy: Strategy) -> Strategy:
        """The strategy with other levels of some places; as it is where they have them already."""
        rules = zero_rules(strategy.zero)
        held = {place: level_of(rules, names[0]) for place, names in self.places.items()}
        levels = {**held, **dict.fromkeys(places, level)}
        return strategy if levels == held else replace(strategy, zero=self._said(levels, axis))

    def _said(self, levels: Mapping[str, int], axis: int) -> Zeros | None:
        """The field of a strategy: patterns of places whose level is not that of most, before all others.

        A long pattern stands before those that would match what it names, too.
        """
        usual = Counter(levels.values()).most_common(1)[0][0]
        every = [place for place, level in levels.items() if level != usual]
        if not every:
            return _zero(usual, axis)
        rest = {"*": _zero(usual, axis)} if usual else {}
        while True:
            every.sort(key=lambda place: (-len(place), place))
            found = {**{place: _zero(levels[place], axis) for place in every}, **rest}
            rules = zero_rules(found)
            wrong = [
                place
                for place, names in self.places.items()
                if place not in every and level_of(rules, names[0]) != levels[place]
            ]
            if not wrong:
                return found
            every += wrong


def _zero(level: int, axis: int) -> Zero | None:
    return Zero(level, axis) if level else None  # type: ignore[arg-type]
