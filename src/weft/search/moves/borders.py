"""Moves of the borders between stages: a module goes to the next stage, or to the one before."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

from weft.compiler.pipeline import Compiled
from weft.ir.logical import Call
from weft.planning.moves import Candidate, StageBorder
from weft.search.moves.strategy_move import StrategyMove
from weft.search.steps.repeated import Blocks
from weft.strategy.parts import Stage
from weft.strategy.strategy import Strategy


def border_moves(strategy: Strategy) -> Iterator[StrategyMove]:
    """The last module of a stage to the next one, the first of it to the one before.

    Args:
        strategy: whose stages name modules (`with_named_stages`); others have no such moves.
    """
    if isinstance(strategy.stages, int):
        return
    for number, stage in enumerate(strategy.stages):
        if len(stage.patterns) < 2:
            continue
        if number + 1 < len(strategy.stages):
            yield _border(stage.patterns[-1], number + 1)
        if number:
            yield _border(stage.patterns[0], number - 1)


def _border(module: str, stage: int) -> StrategyMove:
    return StrategyMove(f"{module} in stage {stage}", partial(_moved, module, stage))


def _moved(module: str, stage: int, strategy: Strategy) -> Strategy:
    """With the module at that end of its new stage where it comes from, so that it may go back."""
    stages = strategy.stages
    assert not isinstance(stages, int)
    before = next(number for number, each in enumerate(stages) if module in each.patterns)
    found = StageBorder(module, stage).on(Candidate(strategy)).strategy
    if before < stage and not isinstance(found.stages, int):
        own = found.stages[stage]
        first = Stage([module, *(each for each in own.patterns if each != module)], own.placement)
        every = [first if number == stage else each for number, each in enumerate(found.stages)]
        return replace(found, stages=tuple(every))
    return found


def with_named_stages(
    strategy: Strategy, compiled: Compiled, blocks: Blocks | None
) -> Strategy | None:
    """A strategy with a number of stages, as one that names the modules and ranks of each.

    A module that an even cut goes through lies in the stage where it begins; the plans stay the same without any.

    Args:
        strategy: with a number of stages.
        compiled: its plans.
        blocks: that come again: each is one module here, all else as deep as calls are.

    Returns:
        None where no module begins in a stage.
    """
    held: dict[str, int] = {}
    for call in compiled.graph.of_kind(Call):
        module = call.location.module if call.location is not None else ""
        if not module or call.phase.kind != "forward":
            continue
        number = blocks.of(module) if blocks is not None else None
        path = module if number is None or blocks is None else blocks.path(number)
        held.setdefault(path, call.phase.stage)
    placements = compiled.stages.placements
    own: Sequence[list[str]] = [
        [path for path, stage in held.items() if stage == number]
        for number in range(len(placements))
    ]
    if not all(own):
        return None
    return replace(strategy, stages=tuple(map(Stage, own, placements)), grid=())
