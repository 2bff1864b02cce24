"""Mixed precision: the forward under autocast, and a mark where the gradient of the loss starts."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from weft.errors import CaptureError

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


def autocast(precision: str | None, device_type: str) -> AbstractContextManager[Any]:
    """While this lasts, torch casts the operands of matrix products and convolutions down.

    Raises:
        CaptureError: when the precision is unknown.
    """
    if precision is None:
        return nullcontext()
    if precision not in _DTYPES:
        raise CaptureError(f"precision={precision!r} is unknown; expected 'bf16', 'fp16' or None")
    return torch.autocast(device_type, dtype=_DTYPES[precision])


def loss_seed(loss: torch.Tensor) -> torch.Tensor:
    """The gradient of the loss by itself: ones, marked for the pass that puts a loss scale there."""
    seed: torch.Tensor = torch.ops.weft.loss_seed(loss)
    return seed


@torch.library.custom_op("weft::loss_seed", mutates_args=(), schema="(Tensor loss) -> Tensor")
def _loss_seed(loss: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(loss)


@_loss_seed.register_fake
def _(loss: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(loss)
