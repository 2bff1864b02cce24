"""Hints in the model's code: `weft.hint(x, sbp=...)` fixes the SBP of a value, `weft.stage(i)` the stage of a block."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch

from weft.capture.fx.locations import stage_noted
from weft.errors import LayoutError, StrategyError, wrong
from weft.layout import SBP, Broadcast, Partial, Split

_capturing: ContextVar[bool] = ContextVar("weft_capturing", default=False)


def hint(x: torch.Tensor, sbp: SBP | tuple[SBP, ...]) -> torch.Tensor:
    """Fix how `x` lies on the placement: one SBP for each axis of the grid.

    Outside of `weft.compile` this returns `x` itself. The gradient of `x` is not fixed by it.

    Raises:
        LayoutError: when `sbp` is not an SBP, or a tuple of them.
    """
    parts = sbp if isinstance(sbp, tuple) else (sbp,)
    if not parts or not all(isinstance(part, Split | Broadcast | Partial) for part in parts):
        raise LayoutError(
            f"hint: expected an SBP such as weft.split(0), or one for each axis of the grid, got {sbp!r}"
        )
    if not capturing():
        return x
    marked: torch.Tensor = torch.ops.weft.hint(x, ",".join(map(str, parts)))
    return marked


def capturing() -> bool:
    """True while this thread captures a step."""
    return _capturing.get()


@contextmanager
def hints_recorded() -> Iterator[None]:
    """While this lasts, `hint` leaves a mark in the graph."""
    token = _capturing.set(True)
    try:
        yield
    finally:
        _capturing.reset(token)


@torch.library.custom_op("weft::hint", mutates_args=(), schema="(Tensor x, str sbp) -> Tensor")
def _hint(x: torch.Tensor, sbp: str) -> torch.Tensor:
    return x.clone()


@_hint.register_fake
def _(x: torch.Tensor, sbp: str) -> torch.Tensor:
    return torch.empty_like(x)


def _hint_backward(context: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
    return gradient, None


_hint.register_autograd(_hint_backward)


def stage(index: int) -> AbstractContextManager[None]:
    """While this lasts, what the model computes belongs to stage `index`, counted from 0; its backward too.

    It takes effect in `weft.compile` with a strategy that has stages, where no pattern of a stage
    says otherwise. The innermost one counts.

    Raises:
        StrategyError: when `index` is no whole number from 0.
    """
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise wrong("weft.stage: index", "the number of a stage, from 0", index, StrategyError)
    return stage_noted(index) if capturing() else nullcontext()
