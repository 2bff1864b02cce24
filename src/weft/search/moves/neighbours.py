"""All moves from a strategy, those first that change most, among them those of time and memory; and moves drawn."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, zip_longest
from math import prod
from random import Random
from typing import Any, Protocol, final

from weft.cached import cached_property
from weft.compiler.schedule.schedule import in_flight
from weft.compiler.stages.stages import stage_placements
from weft.ir.logical import Input, LogicalGraph
from weft.search.measures import key_of
from weft.search.moves.layouts import LayoutMoves, places_of
from weft.search.moves.sequences import Several, StrategyMove, chain_moves
from weft.search.moves.stages import StageMoves
from weft.search.space import divisors, with_fitting_in_flight
from weft.search.state import SearchState
from weft.search.steps.repeated import Blocks
from weft.search.tuning import WORTH
from weft.strategy.parts import SCHEDULES, Zero, Zeros, level_of, zero_axis, zero_rules
from weft.strategy.strategy import Strategy, stage_count

# Micro-batches in flight beside half of 1F1B's: where ranks take turns between stages and gradients of weights are put
# off, plans with so few are about as quick as interleaved ones and hold less (docs/results/search.md).
_MORE = (1, 2, 3)


def _entry(name: str, **entries: Any) -> StrategyMove:
    return StrategyMove(name, lambda strategy: replace(strategy, **entries))


def time_moves(strategy: Strategy, base: Strategy, samples: int) -> Iterator[StrategyMove]:
    """Other micro-batches (of so many samples; 0 if they cannot be cut), schedules and numbers of stages."""
    if base.micro_batches == 1:
        for count in divisors(samples):
            if count != strategy.micro_batches:
                yield _entry(f"{count} micro-batches", micro_batches=count)
    if base.schedule is None and stage_count(strategy) > 1:
        # With the micro-batches in flight that it gives.
        own = {} if base.in_flight is not None else {"in_flight": None}
        yield _entry("computed schedule", schedule=None, **own)
        for schedule in SCHEDULES:
            yield _entry(f"schedule {schedule}", schedule=schedule, **own)
    if strategy.grid and not base.stages and isinstance(strategy.stages or 1, int):

        def staged(stages: Any, strategy: Strategy) -> Strategy:
            return with_fitting_in_flight(replace(strategy, stages=stages), base)

        for count in divisors(strategy.grid[0]):
            yield StrategyMove(f"{count} stages", partial(staged, count if count > 1 else ()))


def in_flight_moves(
    strategy: Strategy, base: Strategy, counts: Sequence[int]
) -> Iterator[StrategyMove]:
    """One micro-batch more or less in flight in one stage; as many as the schedule gives; about half of 1F1B's.

    Args:
        strategy: to move from.
        base: entries that hold for every strategy.
        counts: for each stage, the micro-batches that are in flight there now; one stage has no such moves.
    """
    if base.in_flight is not None or len(counts) < 2:
        return
    yield _entry("in flight as scheduled", in_flight=None)
    for more in _MORE if len(counts) > 2 else ():
        half = tuple(
            min((len(counts) - stage) // 2 + more, strategy.micro_batches)
            for stage in range(len(counts))
        )
        yield _entry(f"half of 1F1B's and {more} more in flight", in_flight=half)
    for stage, count in enumerate(counts):
        for other in (count - 1, count + 1):
            if 1 <= other <= strategy.micro_batches:
                every = (*counts[:stage], other, *counts[stage + 1 :])
                yield _entry(f"{other} in flight in stage {stage}", in_flight=every)


def memory_moves(
    strategy: Strategy, base: Strategy, blocks: Blocks | None
) -> Iterator[StrategyMove]:
    """Other levels of ZeRO along each axis; recomputation and offload of all blocks, of half of them, and of each.

    Without blocks all modules together are one.
    """
    if base.zero is None:
        yield _entry("no ZeRO", zero=None)
        for axis in range(max(len(strategy.grid), 1)):
            for level in (1, 2, 3):
                yield _entry(f"ZeRO {level} along axis {axis}", zero=Zero(level, axis))
    every = () if blocks is None else tuple(map(blocks.path, range(blocks.count)))
    half = len(every) // 2
    several: dict[str, tuple[str, ...]] = {"all": ("*",)}
    if every:
        several = {
            "all blocks": every,
            "the first half of the blocks": every[:half],
            "the last half of the blocks": every[half:],
        }
    for entry in ("recompute", "offload"):
        if not getattr(base, entry):
            yield _entry(f"{entry} nothing", **{entry: ()})
            for name, patterns in several.items():
                yield _entry(f"{entry} {name}", **{entry: patterns})
            for path in every:
                toggled = partial(_toggled, entry, path, every)
                yield StrategyMove(f"{entry} {path}, or no more", toggled)


def _toggled(entry: str, path: str, every: Sequence[str], strategy: Strategy) -> Strategy:
    """A block more or less; a pattern for all becomes their names."""
    held = getattr(strategy, entry)
    named = set(every) if any("*" in pattern for pattern in held) else set(held)
    changed: dict[str, Any] = {entry: tuple(each for each in every if each in named ^ {path})}
    return replace(strategy, **changed)


class Moves(Protocol):
    """Moves from strategies."""

    def every(self, strategy: Strategy) -> Several:
        """All single moves."""

    def cuts(self, strategy: Strategy) -> Iterator[StrategyMove]:
        """The moves that cut a strategy without stages into stages."""

    def drawn(self, random: Random, strategy: Strategy) -> StrategyMove:
        """A move, at random."""


@final
class Neighbours:
    """The moves from strategies of a step."""

    def __init__(self, state: SearchState) -> None:
        self._state, self._facts, self._evaluator = state, state.facts, state.evaluator
        self._by_grid: dict[tuple[int, ...], LayoutMoves] = {}
        self._scheduled: dict[str, tuple[int, ...]] = {}
        self._zero = ZeroMoves(self._facts.step.graph, self._facts.blocks)
        self._stages = StageMoves(state.facts, state.evaluator)

    def families(self, strategy: Strategy) -> tuple[Several, ...]:
        """All single moves, in families.

        The families: tensors, time and memory, ZeRO for groups of parameters, stages, of places and runs, of
        groups, of single calls. Moves after which the strategy is the same are among them.
        """
        layouts, base = self._layouts(strategy), self._facts.base
        flying = in_flight_moves(strategy, base, self._in_flight(strategy))
        return (
            layouts.tensors,
            self._time_and_memory(strategy),
            tuple(self._zero.moves(strategy, base)),
            (*self._stages.borders(strategy), *flying),
            self._places_and_runs(strategy),
            layouts.groupwise,
            layouts.single,
        )

    def every(self, strategy: Strategy) -> Several:
        """All single moves; where ranks wait, places and runs that save bytes are between those of tensors."""
        tensors, rest, zero, stages, _, groupwise, single = self.families(strategy)
        first, last = self._along(strategy)
        pairs = zip_longest(tensors, first)
        laid = [each for pair in pairs for each in pair if each is not None]
        # If something is sharded, it may be more than there is need for.
        begin = (*zero, *laid, *rest) if strategy.zero else (*laid, *rest, *zero)
        return chain_moves(((*begin, *stages), groupwise, last, single))

    def cuts(self, strategy: Strategy) -> Iterator[StrategyMove]:
        """The moves that cut a strategy without stages into stages: by placements and runs, time, borders."""
        first, last = self._along(strategy)
        stages = self._stages.borders(strategy)
        every = chain(first, self._time_and_memory(strategy), stages, last)
        return (move for move in every if move.on(strategy).stages)

    def drawn(self, random: Random, strategy: Strategy) -> StrategyMove:
        """A random move, with equal chance for each family. A move along an edge sets signatures at both ends.

        Two single moves seldom meet on what goes along it.
        """
        families = [family for family in self.families(strategy) if len(family)]
        number = random.randrange(len(families) + 1)
        if number < len(families):
            return random.choice(families[number])
        along = self._layouts(strategy).drawn_along_edge(random)
        return along or random.choice(random.choice(families))

    def _places_and_runs(self, strategy: Strategy) -> list[StrategyMove]:
        grid, fixed = self._grid(strategy), self._facts.base.parameters
        found = list(self._stages.places(strategy))
        for run in self._stages.runs if prod(grid) > 1 else ():
            found += run.moves(grid, fixed)
        return found

    def _along(self, strategy: Strategy) -> tuple[list[StrategyMove], list[StrategyMove]]:
        """Moves of places and runs: those that save bytes, where ranks of the best wait, and all others."""
        moves = sorted(self._places_and_runs(strategy), key=lambda each: -each.worth)
        best = self._state.log.best
        waits = 0.0 if best is None else best.measures.exposed + best.measures.idle
        if best is None or waits <= WORTH * best.measures.seconds:
            return [], moves
        count = sum(each.worth > 0 for each in moves)
        return moves[:count], moves[count:]

    def _time_and_memory(self, strategy: Strategy) -> tuple[StrategyMove, ...]:
        facts = self._facts
        # Micro-batches have statistics of their own: their number changes what a step computes.
        samples = 0 if facts.statistics else facts.samples
        time = time_moves(strategy, facts.base, samples)
        return (*time, *memory_moves(strategy, facts.base, facts.blocks))

    def _in_flight(self, strategy: Strategy) -> tuple[int, ...]:
        """The micro-batches in flight of each stage, as given or as planned; none where there are no stages."""
        if self._facts.base.in_flight is not None or not strategy.stages:
            return ()
        if strategy.in_flight is not None:
            return tuple(min(count, strategy.micro_batches) for count in strategy.in_flight)
        key = key_of(strategy)
        if key not in self._scheduled:
            compiled = self._evaluator.compiled_or_none(strategy)
            plans = () if compiled is None else compiled.schedule.plans
            placements = () if compiled is None else compiled.stages.placements
            self._scheduled[key] = tuple(
                max((in_flight(p, stage) for p in plans if p.rank in placement.ranks), default=1)
                for stage, placement in enumerate(placements)
            )
        return self._scheduled[key]

    def _layouts(self, strategy: Strategy) -> LayoutMoves:
        grid = self._grid(strategy)
        if grid not in self._by_grid:
            facts = self._facts
            self._by_grid[grid] = LayoutMoves(facts.step, facts.blocks, grid, facts.base)
        return self._by_grid[grid]

    def _grid(self, strategy: Strategy) -> tuple[int, ...]:
        """The grid in which layouts are: that of the largest stage."""
        stages = strategy.stages if isinstance(strategy.stages, int) else tuple(strategy.stages)
        placements = stage_placements(stages, self._evaluator.placement(strategy))
        return tuple(max((each.shape for each in placements), key=prod))


# Moves of ZeRO for one group of parameters: those of one place in all blocks, of all blocks, the rest, vectors.
#
# A strategy says levels by patterns. Moves read the level of each place, change some, and write all again in one form:
# equal levels give equal strategies, whatever way led there.


@final
@dataclass(frozen=True)
class ZeroMoves:
    """The moves of ZeRO for groups of the parameters of a step."""

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
        return dict(
            sorted(found, key=lambda each: -sum(prod(self._shapes[name]) for name in each[1]))
        )

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
        """Every other level of every group; where nothing is sharded, along each axis of several ranks."""
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
        rules = zero_rules(strategy.zero)
        held = {place: level_of(rules, names[0]) for place, names in self.places.items()}
        levels = {**held, **dict.fromkeys(places, level)}
        return strategy if levels == held else replace(strategy, zero=self._said(levels, axis))

    def _said(self, levels: Mapping[str, int], axis: int) -> Zeros | None:
        """The field of a strategy: patterns of places whose level is not that of most, before all others.

        A long pattern is before those that would match what it names, too.
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
