"""The counter-based generator: any block of a tensor is drawn alike, and the numbers look random."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from weft.runtime import random as weft_random
from weft.runtime.random import draw_key, uniform


def draw(size, offset=None, length=None, salt=0, seed=1, step=2, dtype=torch.float32):
    offset = [0] * len(size) if offset is None else offset
    return uniform(seed, step, size, offset, length or size, salt, dtype=dtype, device="cpu")


@st.composite
def blocks(draw_):
    size = draw_(st.lists(st.integers(1, 7), max_size=4))
    offset = [draw_(st.integers(0, extent - 1)) for extent in size]
    length = [
        draw_(st.integers(0, extent - first)) for extent, first in zip(size, offset, strict=True)
    ]
    return size, offset, length


@settings(
    max_examples=200, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
@given(blocks(), st.sampled_from([1, 5, 64]))
def test_a_block_holds_the_numbers_of_the_whole(block, chunk):
    size, offset, length = block
    whole = draw(size)
    index = tuple(
        slice(first, first + extent) for first, extent in zip(offset, length, strict=True)
    )
    kept = vars(weft_random)["CPU_CHUNK"]
    vars(weft_random)["CPU_CHUNK"] = chunk
    try:
        assert torch.equal(uniform(1, 2, size, offset, length, 0), whole[index])
    finally:
        vars(weft_random)["CPU_CHUNK"] = kept


def test_the_hash_is_splitmix64():
    """Against plain Python integers, and the first output that the generator's authors publish for seed 1234567."""
    assert weft_random._mix(1234567) == 6457827717110365317
    key = draw_key(1, 2, 0)
    golden = 0x9E3779B97F4A7C15
    expected = [
        (weft_random._mix(key + position * golden) >> 11) * 2.0**-53 for position in range(5)
    ]
    assert draw([5], dtype=torch.float64).tolist() == expected


@pytest.mark.parametrize("change", [{"salt": 1}, {"seed": 2}, {"step": 3}, {"step": 0}])
def test_other_salts_seeds_and_steps_are_independent(change):
    a, b = draw([100_000]), draw([100_000], **change)
    correlation = torch.corrcoef(torch.stack([a, b]))[0, 1]
    assert correlation.abs() < 0.015


def test_moments_and_neighbours():
    numbers = draw([400_000], dtype=torch.float64)
    assert numbers.mean().item() == pytest.approx(0.5, abs=2e-3)
    assert numbers.var().item() == pytest.approx(1 / 12, abs=1e-3)
    for lag in (1, 2, 64, 1024):
        pair = torch.stack([numbers[:-lag], numbers[lag:]])
        assert torch.corrcoef(pair)[0, 1].abs() < 0.01
    counts = torch.histc(numbers, 100, 0, 1)
    chi_square = ((counts - 4000) ** 2 / 4000).sum().item()
    assert 50 < chi_square < 160  # 99 degrees of freedom
    assert numbers.unique().numel() == numbers.numel()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_numbers_are_in_range_for_every_dtype(dtype):
    numbers = draw([300_000], dtype=dtype)
    assert numbers.dtype == dtype
    assert numbers.min() >= 0
    assert numbers.max() < 1


def test_low_precision_is_float32_rounded_down():
    numbers, rounded = draw([10_000]), draw([10_000], dtype=torch.bfloat16).float()
    assert (rounded <= numbers).all()
    assert (numbers - rounded < 2**-8).all()
    mean = draw([100_000], dtype=torch.float16).float().mean().item()
    assert mean == pytest.approx(0.5, abs=5e-3)
