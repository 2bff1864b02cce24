"""Ops between a micro-batch and the step (`weft.ops.rules.time`), on local tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def alone(x: Tensor, argument: Any) -> Tensor:
    """`weft.accumulate` and `weft.pack` of a single micro-batch, and `weft.use`: `x` itself."""
    return x


TIME_OPS: dict[str, Callable[..., Any]] = {
    "weft.accumulate": alone,
    "weft.pack": alone,
    "weft.use": alone,
}
