"""Stages in the model's code: `with weft.stage(i)` puts what runs inside into stage `i` of a pipeline."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from weft.capture.fx.locations import stage_noted
from weft.capture.hint import capturing
from weft.errors import StrategyError


def stage(index: int) -> AbstractContextManager[None]:
    """While this lasts, what the model computes belongs to stage `index`, counted from 0; its backward too.

    It takes effect in `weft.compile` with a strategy that has stages, where no pattern of a stage
    says otherwise. The innermost one counts.

    Raises:
        StrategyError: when `index` is no whole number from 0.
    """
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise StrategyError(f"weft.stage(…) takes the number of a stage, from 0, found {index!r}")
    return stage_noted(index) if capturing() else nullcontext()
