"""Whole numbers as users give them: of Python, numpy or torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.errors import UserError, shown


def whole_number(value: Any) -> int | None:
    """A whole number as Python has it; None for anything else, truth values among it."""
    if isinstance(value, bool | np.bool_) or getattr(value, "dtype", None) == torch.bool:
        return None
    try:
        return index(value)
    except (TypeError, RuntimeError):  # of torch, for what has no values
        return None


def whole_numbers(given: Any, where: str) -> list[int]:
    """Whole numbers from 0, one behind the other: of a list, of an array or a tensor of one dimension.

    Raises:
        UserError: naming the first that is none.
    """
    every = _listed(given)
    if every is None:
        raise UserError(
            f"{where} takes whole numbers from 0, one for each, as a list or an array of one dimension, found "
            f"{shown(given)}"
        )
    found: list[int] = []
    for place, each in enumerate(every):
        number = whole_number(each)
        if number is None or number < 0:
            raise UserError(
                f"{where} takes whole numbers from 0, one for each, found {shown(each)}, a {type(each).__name__}, at "
                f"place {place}"
            )
        found.append(number)
    return found


def _listed(given: Any) -> Iterable[Any] | None:
    """The elements of something that may hold numbers; None where it cannot."""
    if isinstance(given, Tensor) and (given.layout != torch.strided or given.is_meta):
        return None
    if isinstance(given, np.ndarray | Tensor):
        return list(given.tolist()) if given.ndim == 1 else None
    # Of sets nobody knows the order.
    other = isinstance(given, str | bytes | Mapping | Set)
    return given if isinstance(given, Iterable) and not other else None
