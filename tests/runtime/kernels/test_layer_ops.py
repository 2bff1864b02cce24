"""BatchNorm's own kernels against ATen's: whole, and in parts that are added up."""

# Kernels are called with lists of what their ops take.
# mypy: disable-error-code="call-arg"

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tools.oracles import meanings as check_recurrent
from weft.ops.rules.layers import saved_bytes
from weft.runtime.kernels import layer_ops as recurrent
from weft.runtime.kernels.layer_ops import (
    batch_moments,
    batch_norm,
    batch_norm_backward,
    batch_norm_gradient,
    batch_norm_sums,
    batch_statistics,
)

aten = torch.ops.aten
SHAPES = [(5, 3, 9, 8), (5, 3, 4, 4), (5, 3, 2, 2), (5, 3, 1, 2), (5, 3, 1, 1), (5, 3, 7), (5, 3)]
FORMATS = [torch.contiguous_format, torch.channels_last]
FORWARD = "aten._native_batch_norm_legit_functional.default"
BACKWARD = "aten.native_batch_norm_backward.default"


def images(*shape: int, mean: float = 1.0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    drawn = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    return (2 * drawn + mean).to(dtype)


def of_channels() -> tuple[torch.Tensor, ...]:
    weight, bias = torch.tensor([0.5, 1.0, -2.0]), torch.tensor([0.0, 1.0, 2.0])
    return weight, bias, torch.zeros(3), torch.ones(3)


def same(found: Any, expected: Any, **tolerance: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, **tolerance)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("layout", FORMATS)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_whole_batch(shape: tuple[int, ...], layout: torch.memory_format) -> None:
    x, grad = images(*shape), images(*shape, mean=0).flip(0)
    if len(shape) == 4:
        x, grad = (one.contiguous(memory_format=layout) for one in (x, grad))
    weight, bias, *running = of_channels()
    args = (x, weight, bias, *running, True, 0.1, 1e-5)
    expected = aten._native_batch_norm_legit_functional.default(*args)
    same(batch_norm(*args), expected)
    back = (grad, x, weight, None, None, *expected[1:3], True, 1e-5, [True, True, True])
    gradients = aten.native_batch_norm_backward.default(*back)
    same(batch_norm_backward(*back), gradients, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_batch_in_parts(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, grad = images(*shape, dtype=dtype), images(*shape, mean=0, dtype=dtype).flip(0)
    small = torch.float64 if dtype == torch.float64 else torch.float32
    weight, bias, *running = (one.to(small) for one in of_channels())
    expected = aten._native_batch_norm_legit_functional.default(
        x, weight, bias, *running, True, 0.1, 1e-5
    )
    count = x.numel() // 3
    moments = sum(batch_moments(part) for part in (x[:2], x[2:]))
    _, *found = batch_statistics(moments, *running, count, 0.1, 1e-5, small)
    same(found, expected[1:])
    back = (grad, x, weight, None, None, *found[:2], True, 1e-5, [True, True, True])
    to_x, *to_others = aten.native_batch_norm_backward.default(*back)
    parts = [(grad[:2], x[:2]), (grad[2:], x[2:])]
    sums = sum(batch_norm_sums(*part, *found[:2]) for part in parts)
    rough = (
        {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    )
    same(sums, to_others, **rough)
    pieces = [batch_norm_gradient(*part, weight, *found[:2], sums, count) for part in parts]
    torch.testing.assert_close(torch.cat(pieces), to_x, **rough)


@pytest.mark.parametrize("size", [2, 8])
def test_statistics_far_from_zero_keep_their_digits(size: int) -> None:
    """Of mean 10,000 and deviation 2, squares in float32 would leave no digit of the variance."""
    x = images(20, 3, size, size, mean=1e4)
    moments = batch_moments(x[:7]) + batch_moments(x[7:])
    count = x.numel() // 3
    var, mean, rstd, *_ = batch_statistics(moments, None, None, count, 0.1, 0.0, torch.float32)
    exact = x.double().var((0, 2, 3), correction=0)
    same((mean,), (x.double().mean((0, 2, 3)).float(),))
    same((var, rstd), (exact.float(), exact.rsqrt().float()), rtol=1e-3, atol=0.0)


def test_a_channel_of_one_value_has_no_variance() -> None:
    moments = batch_moments(torch.full((4, 3, 8, 8), 3.0))
    var, mean, rstd, *_ = batch_statistics(moments, None, None, 256, 0.1, 1e-5, torch.float32)
    same((var, mean), (torch.zeros(3), torch.full((3,), 3.0)))
    same((rstd,), (torch.full((3,), 1e-5**-0.5),))


# A layer of an LSTM by oneDNN's kernel and by torch's ops, against torch's own layer.

TIME, BATCH, INPUTS, HIDDEN = 5, 3, 4, 6
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


def operands(dtype: torch.dtype, biased: bool) -> list[Tensor | None]:
    """An input whose batch comes first in memory, small weights, biases or none, state and cell."""
    torch.manual_seed(0)
    x = drawn(BATCH, TIME, INPUTS, dtype=dtype).transpose(0, 1)
    weights = [drawn(4 * HIDDEN, n, dtype=dtype) / 4 for n in (INPUTS, HIDDEN)]
    biases = [drawn(4 * HIDDEN, dtype=dtype) if biased else None for _ in range(2)]
    # States that are slices, as those of one layer of several are.
    h, c = drawn(BATCH, 2 * HIDDEN, dtype=dtype).chunk(2, 1)
    return [x, *weights, *biases, h, c]


def given_gradients(dtype: torch.dtype) -> list[Tensor]:
    shapes = ((TIME, BATCH, HIDDEN), (BATCH, HIDDEN), (BATCH, HIDDEN))
    return [drawn(*shape, dtype=dtype) for shape in shapes]


def assert_alike(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], atol: float) -> None:
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, atol=atol, rtol=atol)


@pytest.mark.parametrize("kernel", [True, False], ids=["kernel", "steps"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(("reverse", "biased"), [(False, True), (True, False)])
def test_a_layer_is_torchs(
    kernel: bool, dtype: torch.dtype, reverse: bool, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not kernel:
        monkeypatch.setattr(recurrent, "_has_kernel", lambda x: False)
    call, gradients = operands(dtype, biased), given_gradients(dtype)
    with torch.no_grad():
        made = recurrent.lstm(*call, reverse, True)
        alone = recurrent.lstm(*call, reverse, False)
        found = recurrent.lstm_backward(*gradients, *call, *made, reverse)
        states_only = recurrent.lstm_backward(gradients[0], None, None, *call, *made, reverse)
    wide = [one if one is None else one.double() for one in call]
    expected = check_recurrent.lstm(*wide, reverse, True)[:3]
    atol = TOLERANCE[dtype]
    assert_alike(made[:3], tuple(one.to(dtype) for one in expected), atol)
    assert_alike(alone[:3], made[:3], atol)
    assert alone[3].numel() == 0
    for each, own in ((gradients, found), ([gradients[0], None, None], states_only)):
        given = [one if one is None else one.double() for one in each]
        whole = check_recurrent.lstm_backward(*given, *wide, *expected, None, reverse)
        assert_alike(own, tuple(one.to(dtype) for one in whole), 4 * atol)
    # Nothing that is returned shares memory, or is recorded by autograd.
    memory = [one.untyped_storage().data_ptr() for one in (*made, *found)]
    assert len(set(memory)) == len(memory)
    assert not any(one.requires_grad for one in made)


@pytest.mark.skipif(
    not recurrent._has_kernel(torch.zeros(1))
    or "AVX512" not in torch.backends.cpu.get_cpu_capability(),
    reason="the workspace's size is known for AVX-512",
)
@pytest.mark.parametrize("sizes", [(9, 64, 40, 32), (6, 32, 64, 128)])
def test_the_plan_knows_what_is_saved(sizes: tuple[int, int, int, int]) -> None:
    steps, batch, inputs, hidden = sizes
    x, weights = torch.zeros(steps, batch, inputs), [torch.zeros(4 * hidden, inputs)]
    weights += [torch.zeros(4 * hidden, hidden)]
    state = torch.zeros(batch, hidden)
    saved = recurrent.lstm(x, *weights, None, None, state, state, False, True)[3]
    planned = batch * saved_bytes(steps, inputs, hidden, "float32", True)
    assert saved.numel() == pytest.approx(planned, rel=0.02)
