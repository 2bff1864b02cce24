"""Checks of the arguments of functions that make global tensors: the border to users, once, before anything is made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import Any

import torch

from weft.errors import LayoutError, UserError, WeftError, is_whole, shown, wrong
from weft.layout import Placement

# Elements that torch can count.
_MOST = 2**63 - 1


def checked_placement(placement: object, what: str) -> Placement:
    """The placement itself; raises LayoutError for anything else."""
    if not isinstance(placement, Placement):
        expected = 'weft.placement("cpu", [0, 1]) or the like'
        raise wrong(f"{what}: placement=", expected, placement, LayoutError)
    return placement


def checked_size(size: object, what: str) -> tuple[int, ...]:
    """The shape of a whole tensor as a tuple; raises UserError for anything else."""
    sizes = tuple(size) if isinstance(size, list | tuple | range) else None
    if sizes is None or not all(is_whole(each, 0) for each in sizes):
        raise wrong(what, "whole numbers from 0 as the shape", size)
    if prod(sizes) > _MOST or any(each > _MOST for each in sizes):
        raise UserError(
            f"{what}: no tensor has the shape {shown(size)}; give one of at most {_MOST} elements"
        )
    return sizes


def checked_dtype(dtype: object, what: str) -> torch.dtype | None:
    """The dtype, or None; raises UserError for anything else."""
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise wrong(f"{what}: dtype=", "a torch.dtype or None", dtype)
    return dtype


def checked_number(value: object, what: str) -> Any:
    """A number that a tensor can hold; raises UserError for anything else."""
    if not isinstance(value, bool | int | float | complex) or (
        isinstance(value, int) and not -_MOST - 1 <= value <= _MOST
    ):
        raise wrong(what, "a number", value)
    return value


def check_gradient(requires_grad: object, dtype: torch.dtype | None, what: str) -> None:
    """Check that `requires_grad` is True or False, and that a tensor of this dtype may have a gradient.

    Raises:
        UserError: when it is not.
    """
    if not isinstance(requires_grad, bool):
        raise wrong(f"{what}: requires_grad=", "True or False", requires_grad)
    if requires_grad and dtype is not None and not (dtype.is_floating_point or dtype.is_complex):
        raise UserError(
            f"{what}: only floating-point tensors have gradients, got dtype {dtype}; give another dtype="
        )


@contextmanager
def refused(what: str, found: object) -> Iterator[None]:
    """Say of torch's error which call it refuses, and what it was given."""
    try:
        yield
    except WeftError:
        raise
    except (TypeError, ValueError, RuntimeError, OverflowError, NotImplementedError) as error:
        text = str(error).partition("\n")[0]
        raise UserError(f"{what}: {shown(found)}: {text}") from error


def sizes_of(size: Sequence[Any]) -> Any:
    """`f(2, 3)` and `f((2, 3))` mean the same."""
    return size[0] if len(size) == 1 and not isinstance(size[0], int) else size
