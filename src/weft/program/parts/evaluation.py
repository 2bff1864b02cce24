"""The plans of an evaluation with the live parameters of a program that is there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from weft.program.everyone import agreed
from weft.program.parts.core import ProgramCore
from weft.program.planning.build import evaluation
from weft.program.planning.step import Step
from weft.program.planning.variants import Planned, Variants


def evaluation_of(
    core: ProgramCore, function: Callable[[nn.Module, Any], Any], example_batch: Any
) -> tuple[Variants, Step]:
    """The step of `Program.evaluation`, and its plans. Every process must call it.

    Args:
        core: of the program whose model is evaluated.
        function: `function(model, batch)`.
        example_batch: as the program takes batches.
    """
    core.enter("evaluation")
    setting, trained = core.setting, core.compiled
    example = setting.whole(example_batch)
    first = agreed(
        setting.world, "the plan", lambda: evaluation(setting, trained, function, example)
    )
    step = Step(setting.model, function, None, example)

    def plan(batch: Any) -> Planned:
        return evaluation(setting, trained, function, batch, first[0], step.changing)

    return Variants(setting, first, step, plan), step
