"""Numbers as JSON has them: what is not finite, which JSON has no word for, is null."""

from __future__ import annotations

from math import isfinite
from typing import Any


def finite(number: float | None) -> float | None:
    """The number; None for NaN and infinities."""
    return number if number is None or isfinite(number) else None


def all_finite(data: Any) -> Any:
    """Plain data with None for each number that is not finite."""
    if isinstance(data, dict):
        return {name: all_finite(each) for name, each in data.items()}
    if isinstance(data, list | tuple):
        return [all_finite(each) for each in data]
    return finite(data) if isinstance(data, float) else data
