"""Causal attention of a part of the queries, by fused kernels, against its meaning."""

# Kernels are called with lists of what their ops take.
# mypy: disable-error-code="call-arg"

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tools.oracles import meanings as meaning
from weft.runtime.kernels.local_ops import attention_rows, attention_rows_backward

TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 5e-2}


def _draw(
    rows: int, keys: int, heads: tuple[int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    shapes = [(2, heads[0], rows, 8)] * 2 + [(2, heads[1], keys, 8)] * 2
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)])
@pytest.mark.parametrize("offset", [0, 1, 3, 5, 8, 9, 12])
def test_rows_are_those_of_causal_attention(
    offset: int, heads: tuple[int, int], dtype: torch.dtype
) -> None:
    """Nine keys and five queries: also where queries begin at the last key, or behind it."""
    grad, *operands = _draw(5, 9, heads, dtype)
    found, sums = attention_rows(*operands, offset, scale=0.3)
    exact = [one.double() for one in operands]
    expected, expected_sums = meaning.attention_rows(*exact, offset, 0.3)
    near = {"rtol": TOLERANCE[dtype], "atol": TOLERANCE[dtype], "check_dtype": False}
    torch.testing.assert_close(found, expected, **near)
    torch.testing.assert_close(sums, expected_sums, **near)
    assert found.dtype == dtype
    gradients = attention_rows_backward(grad, *operands, found, sums, offset, scale=0.3)
    saved = (expected, expected_sums, offset, 0.3)
    for one, whole in zip(
        gradients, meaning.attention_rows_backward(grad.double(), *exact, *saved), strict=True
    ):
        assert one.dtype == dtype
        torch.testing.assert_close(one, whole, **near)


@pytest.mark.parametrize("offset", [0, 3, 9])
def test_results_lie_in_memory_as_the_kernel_leaves_them(offset: int) -> None:
    """Views that were captured behind the kernel must be possible behind its rows."""
    grad, *operands = _draw(4, 9, (4, 2), torch.float32)
    aten = torch.ops.aten
    made = aten._scaled_dot_product_flash_attention_for_cpu.default(*operands)
    found = attention_rows(*operands, offset)
    assert [one.stride() for one in found] == [one.stride() for one in made]
    backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
    gradients = attention_rows_backward(grad, *operands, *found, offset)
    expected = backward(grad, *operands, *made, 0.0, False)
    assert [one.stride() for one in gradients] == [one.stride() for one in expected]


class _Largest(TorchDispatchMode):
    """The most elements that a result of an op has."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, tuple) else (found,):
            self.elements = max(self.elements, one.numel())
        return found


def test_no_tensor_of_queries_times_keys_is_made() -> None:
    grad, *operands = _draw(64, 256, (4, 4), torch.float32)
    with _Largest() as largest:
        found = attention_rows(*operands, 128)
        attention_rows_backward(grad, *operands, *found, 128)
    assert largest.elements == operands[1].numel()
