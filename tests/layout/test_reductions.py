"""Reductions: what each dtype takes, and the elements that change nothing, against torch's own arithmetic."""

from __future__ import annotations

import pytest
import torch

from weft.errors import LayoutError
from weft.layout import (
    IDEMPOTENT,
    REDUCTIONS,
    Layout,
    Partial,
    Reduction,
    neutral,
    parse_sbp,
    partial,
    placement,
    reductions_of,
)
from weft.runtime.channels.channel import reduce_in_order
from weft.units import ITEM_SIZE

# torch cannot compare complex32.
DTYPES = [dtype for dtype in ITEM_SIZE if dtype != "complex32"]
PAIRS = [(dtype, reduction) for dtype in DTYPES for reduction in reductions_of(dtype)]


def extremes(dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.bool:
        return torch.tensor([False, True])
    if dtype.is_complex:
        return torch.tensor([0, 1 - 2j, -3], dtype=dtype)
    if dtype.is_floating_point:
        inf = float("inf")
        return torch.tensor([0, 1.5, -2, inf, -inf, torch.finfo(dtype).max], dtype=dtype)
    limits = torch.iinfo(dtype)
    return torch.tensor([0, 1, 5, limits.min, limits.max], dtype=dtype)


@pytest.mark.parametrize(("dtype", "reduction"), PAIRS)
def test_the_neutral_element_changes_nothing(dtype: str, reduction: Reduction) -> None:
    values = extremes(getattr(torch, dtype))
    element = torch.full_like(values, neutral(reduction, dtype))
    assert reduce_in_order([values, element], reduction).equal(values)
    assert reduce_in_order([element, values, element], reduction).equal(values)
    twice = reduce_in_order([values, values], reduction)
    assert reduction not in IDEMPOTENT or twice.equal(values)


def test_what_each_dtype_takes() -> None:
    assert reductions_of("float32") == ("sum", "max", "min", "prod")
    assert reductions_of("complex64") == ("sum", "prod")
    assert reductions_of("float8_e4m3fn") == ()
    assert reductions_of("int32") == reductions_of("uint8") == reductions_of("bool") == REDUCTIONS


@pytest.mark.parametrize(
    ("dtype", "reduction"),
    [("float32", "xor"), ("bfloat16", "and"), ("complex64", "max"), ("float8_e5m2", "sum")],
)
def test_what_a_dtype_does_not_take_is_refused(dtype: str, reduction: Reduction) -> None:
    with pytest.raises(
        LayoutError, match=rf"P\({reduction}\) of {dtype} has no meaning.*takes (sum|none)"
    ):
        neutral(reduction, dtype)
    with pytest.raises(LayoutError, match="has no meaning"):
        Layout(placement("cpu", [0, 1]), (Partial(reduction),)).check_dtype(dtype)


def test_text_of_every_reduction() -> None:
    for reduction in REDUCTIONS:
        assert parse_sbp(f"P({reduction})") == partial(reduction) == Partial(reduction)
    with pytest.raises(LayoutError, match="one of sum, max, min, prod, and, or, xor, got 'mean'"):
        partial("mean")
