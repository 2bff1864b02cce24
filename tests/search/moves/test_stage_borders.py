"""Moves: what each changes of a candidate, and what it refuses."""

from __future__ import annotations

import pytest

import weft
from weft.errors import StrategyError
from weft.search.moves.stages import BorderMove, StageBorder
from weft.strategy.strategy import Strategy

STAGES = (
    weft.Stage(["embed", "blocks.0"], weft.placement("cpu", [0])),
    weft.Stage(["blocks.1", "head"], weft.placement("cpu", [1])),
)
STAGED = BorderMove(Strategy(stages=STAGES))


def test_a_module_goes_to_another_stage() -> None:
    stages = StageBorder("blocks.0", 1).on(STAGED).strategy.stages
    assert not isinstance(stages, int)
    assert [stage.patterns for stage in stages] == [("embed",), ("blocks.1", "head", "blocks.0")]
    assert [stage.placement for stage in stages] == [stage.placement for stage in STAGES]


@pytest.mark.parametrize(
    ("candidate", "move", "said"),
    [
        (STAGED, StageBorder("blocks.0", 2), "2 stages"),
        (STAGED, StageBorder("blocks.7", 0), "no stage names just this module"),
        (BorderMove(Strategy(stages=2)), StageBorder("blocks.0", 0), "stages=2"),
    ],
)
def test_moves_that_do_not_fit_are_refused(
    candidate: BorderMove, move: StageBorder, said: str
) -> None:
    with pytest.raises(StrategyError, match=said):
        move.on(candidate)
