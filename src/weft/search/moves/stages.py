"""Moves of stages from any strategy: their modules are named first, since a number of stages has none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import permutations
from typing import final

from weft.cached import cached_property
from weft.compiler.pipeline import Compiled
from weft.hardware.costs import seconds_model
from weft.ir.logical import Call
from weft.layout import Placement
from weft.search.evaluator import Evaluator
from weft.search.measures import key_of
from weft.search.moves.layouts import WeightRun, runs_of, weights_of
from weft.search.moves.placement_moves import (
    PlacementMoves,
    joined_rows,
    row_count,
    some_rows,
    with_stages,
)
from weft.search.moves.sequences import StrategyMove
from weft.search.steps.facts import StepFacts
from weft.search.steps.parts import Parts, parts_of
from weft.search.steps.repeated import Blocks, unit_of
from weft.strategy.parts import Stage
from weft.strategy.strategy import Strategy

# Micro-batches with which stages on different ranks work at the same time, where the strategy has one.
_CUT = 4


@final
@dataclass(frozen=True, eq=False)
class StageMoves:
    """The moves of stages of one step, which `evaluator` plans."""

    facts: StepFacts
    evaluator: Evaluator
    _named: dict[str, Strategy | None] = field(default_factory=dict, repr=False)
    _borders: dict[str, tuple[StrategyMove, ...]] = field(default_factory=dict, repr=False)
    _placed: dict[object, tuple[StrategyMove, ...]] = field(default_factory=dict, repr=False)

    @cached_property
    def parts(self) -> Parts:
        """The parts of the model, with what they cost on the machine."""
        facts = self.facts
        model = seconds_model(facts.machine.planned, facts.ranks)
        return parts_of(facts.step.graph, facts.blocks, model)

    @cached_property
    def runs(self) -> tuple[WeightRun, ...]:
        """Weights alike along the model, those first that save most where they are split."""
        parts = self.parts
        weights = weights_of(self.facts.step, parts.calls, tuple(parts.units))
        return runs_of(weights, self.facts.base.parameters)

    def borders(self, strategy: Strategy) -> tuple[StrategyMove, ...]:
        """Modules, and ranks, that go to another stage; none where it has no stages."""
        if strategy.stages in ((), 1):
            return ()
        key = key_of(strategy)
        if key not in self._borders:
            named = self._with_names(strategy)
            found = () if named is None else (*border_moves(named), *share_moves(named))

            def on(change: StrategyMove, strategy: Strategy) -> Strategy:
                assert named is not None
                return change.on(replace(strategy, stages=named.stages, grid=()))

            self._borders[key] = tuple(StrategyMove(each.name, partial(on, each)) for each in found)
        return self._borders[key]

    def places(self, strategy: Strategy) -> tuple[StrategyMove, ...]:
        """Parts on ranks of their own, and stages that become two; those of the most worth first."""
        if len(self.facts.ranks) == 1:
            return ()
        named = self._with_names(strategy)
        if named is None or isinstance(named.stages, int):
            return ()
        own, facts = strategy.micro_batches, self.facts
        free = facts.base.micro_batches == 1 and not facts.statistics
        cut = own == 1 and free and facts.samples > 0 and facts.samples % _CUT == 0
        stages, micro_batches = tuple(named.stages), (own, _CUT) if cut else (own,)
        key = str(stages), micro_batches
        if key not in self._placed:
            self._placed[key] = tuple(PlacementMoves(self.parts, stages, micro_batches).best())
        return self._placed[key]

    def _with_names(self, strategy: Strategy) -> Strategy | None:
        """The strategy with the modules and ranks of each stage; None if stages are fixed, or it has no plan."""
        base, stages = self.facts.base, strategy.stages
        if base.stages or base.grid:
            return None
        if not isinstance(stages, int) and stages:
            return strategy
        if stages in ((), 1):
            whole = Stage(tuple(self.parts.units), self.evaluator.placement(strategy))
            return replace(strategy, stages=(whole,), grid=())
        key = key_of(strategy)
        if key not in self._named:
            compiled, blocks = self.evaluator.compiled_or_none(strategy), self.facts.blocks
            named = None if compiled is None else with_named_stages(strategy, compiled, blocks)
            self._named[key] = named
        return self._named[key]


def border_moves(strategy: Strategy) -> Iterator[StrategyMove]:
    """The last module of a stage to the next one, the first to the one before; none where stages name no modules."""
    if isinstance(strategy.stages, int):
        return
    for number, stage in enumerate(strategy.stages):
        if len(stage.patterns) < 2:
            continue
        last = [(stage.patterns[-1], number + 1)] if number + 1 < len(strategy.stages) else []
        first = [(stage.patterns[0], number - 1)] if number else []
        for module, other in (*last, *first):
            yield StrategyMove(f"{module} in stage {other}", partial(_moved, module, other))


def _moved(module: str, stage: int, strategy: Strategy) -> Strategy:
    """With the module at that end of its new stage where it comes from, so that it may go back."""
    stages = strategy.stages
    assert not isinstance(stages, int)
    before = next(number for number, each in enumerate(stages) if module in each.patterns)
    found = []
    for number, each in enumerate(stages):
        patterns = [pattern for pattern in each.patterns if pattern != module]
        if number == stage:
            patterns.insert(0 if before < stage else len(patterns), module)
        found.append(Stage(patterns, each.placement))
    return replace(strategy, stages=tuple(found))


def with_named_stages(
    strategy: Strategy, compiled: Compiled, blocks: Blocks | None
) -> Strategy | None:
    """A strategy with a number of stages, as one that names the modules and ranks of each, as its plans say.

    Each block is one module, all else as deep as calls are. A module that an even cut goes through is in the stage
    where it begins; the plans stay the same without any. None if no module begins in a stage.
    """
    held: dict[str, int] = {}
    for call in compiled.graph.of_kind(Call):
        module = call.location.module if call.location is not None else ""
        if not module or call.phase.kind != "forward":
            continue
        held.setdefault(unit_of(blocks, module) or module, call.phase.stage)
    placements = compiled.stages.placements
    own: Sequence[list[str]] = [
        [path for path, stage in held.items() if stage == number]
        for number in range(len(placements))
    ]
    if not all(own):
        return None
    return replace(strategy, stages=tuple(map(Stage, own, placements)), grid=())


Stages = tuple[Stage, ...]


def share_moves(strategy: Strategy) -> Iterator[StrategyMove]:
    """Ranks given to another stage, and stages joined; none where stages name no modules."""
    if isinstance(strategy.stages, int) or len(strategy.stages) < 2:
        return
    stages = tuple(strategy.stages)
    found = [*_joined(stages), *_given(stages), *_resized(stages)]
    for name, changed in found:
        yield StrategyMove(name, partial(with_stages, changed, strategy.micro_batches))


def _joined(stages: Stages) -> Iterator[tuple[str, Stages]]:
    """A stage and the next one as one, on the ranks of both."""
    for number in range(len(stages) - 1):
        one, two = stages[number : number + 2]
        placement = joined_rows(one.placement, two.placement)
        if placement is not None:
            both = Stage((*one.patterns, *two.patterns), placement)
            joined = *stages[:number], both, *stages[number + 2 :]
            yield f"stages {number} and {number + 1} as one", joined


def _given(stages: Stages) -> Iterator[tuple[str, Stages]]:
    """One rank, or half of them, of a stage to the one before or after it."""
    for number in range(len(stages) - 1):
        for giver, taker in ((number, number + 1), (number + 1, number)):
            given, taken = stages[giver].placement, stages[taker].placement
            count = row_count(given)
            if not set(given.ranks).isdisjoint(taken.ranks):
                continue
            for size in sorted({1, count // 2} - {0, count}):
                ends = range(count - size, count) if giver < taker else range(size)
                left = [row for row in range(count) if row not in ends]
                more = joined_rows(taken, some_rows(given, ends))
                if more is not None:
                    changed = {giver: some_rows(given, left), taker: more}
                    yield f"{size} rows of stage {giver} to stage {taker}", _on(stages, changed)


def _resized(stages: Stages) -> Iterator[tuple[str, Stages]]:
    """Twice or half as many ranks for a stage on some of another's."""
    for (number, inner), (_, outer) in permutations(enumerate(stages), 2):
        own, every = inner.placement, outer.placement
        if own.axes != every.axes or not set(own.ranks) < set(every.ranks):
            continue
        count, most = row_count(own), row_count(every)
        for size in (count // 2, 2 * count):
            if 0 < size <= most:
                ranks = sorted(own.ranks)
                apart = ranks[-1] - ranks[0] >= len(ranks)
                rows = range(0, most, most // size)[:size] if apart else range(size)
                changed = some_rows(every, rows)
                yield f"stage {number} on {size} rows", _on(stages, {number: changed})


def _on(stages: Stages, placements: dict[int, Placement]) -> Stages:
    return tuple(
        Stage(stage.patterns, placements.get(number, stage.placement))
        for number, stage in enumerate(stages)
    )
