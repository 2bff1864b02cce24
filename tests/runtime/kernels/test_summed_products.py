"""Sums of products over micro-batches: joined only where nobody else sees the product, and equal to the sum."""

from __future__ import annotations

import pytest
import torch

import build
from weft.ir.logical import Ref
from weft.ir.plan import LocalCall
from weft.runtime.kernels.generated import build_kernel

M, ROWS, WIDTH = 3, 5, 4


def call(op: str, made: str, *args: object, dtype: str = "float32") -> LocalCall:
    return build.call(op, args, build.value(made, WIDTH, WIDTH, dtype=dtype))


def product(dtype: str = "float32") -> LocalCall:
    return call("aten.mm.default", "product", Ref("a"), Ref("b"), dtype=dtype)


def total(reduction: str = "sum", dtype: str = "float32") -> LocalCall:
    return call("weft.accumulate", "total", Ref("product"), reduction, dtype=dtype)


def joined(calls: list[LocalCall], outputs: tuple[str, ...] = ("total",)) -> bool:
    kernel = build_kernel(calls, outputs, torch.device("cpu"), micro_batches=M)
    return "mm" not in kernel.source


def test_the_sum_of_products_is_that_of_all_micro_batches_in_every_step():
    kernel = build_kernel([product(), total()], ("total",), torch.device("cpu"), micro_batches=M)
    torch.manual_seed(0)
    for _ in range(2):
        pairs = [(torch.randn(WIDTH, ROWS), torch.randn(ROWS, WIDTH)) for _ in range(M)]
        for micro, (a, b) in enumerate(pairs):
            (made,) = kernel.function(None, micro, a, b)
        torch.testing.assert_close(made, torch.stack([a @ b for a, b in pairs]).sum(0))


@pytest.mark.parametrize(
    ("calls", "outputs", "expected"),
    [
        ([product(), total()], ("total",), True),
        ([product(), total()], ("product", "total"), False),
        (
            [product(), call("aten.neg.default", "n", Ref("product")), total()],
            ("n", "total"),
            False,
        ),
        ([product(), total("max")], ("total",), False),
        ([product("bfloat16"), total(dtype="bfloat16")], ("total",), False),
    ],
    ids=["alone", "returned", "read", "maximum", "short floats"],
)
def test_a_product_is_joined_with_its_sum_where_nobody_else_sees_it(calls, outputs, expected):
    assert joined(calls, outputs) == expected
