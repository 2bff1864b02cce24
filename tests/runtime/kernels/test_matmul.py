"""Large products of matrices by oneDNN."""

from __future__ import annotations

import pytest
import torch

import build
from build import refs
from weft.runtime.kernels import dense_operands
from weft.runtime.kernels.generated import build_kernel

CPU = torch.device("cpu")


@pytest.fixture
def counted(monkeypatch):
    """The calls of oneDNN."""
    calls = []

    def linear(*args):
        calls.append(args)
        return torch.ops.mkldnn._linear_pointwise.default(*args)

    monkeypatch.setattr(dense_operands, "_linear", lambda: linear)
    return calls


def call(op, shape, *names, dtype="float32"):
    return build.call(op, refs(*names), build.value("y", *shape, dtype=dtype))


def run(made, *inputs):
    return build_kernel((made,), ("y",), CPU).function(None, *inputs)[0]


def test_this_torch_has_the_op_that_is_called():
    assert "Tensor X, Tensor W, Tensor? B, str attr" in str(
        torch.ops.mkldnn._linear_pointwise.default._schema
    )


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
def test_large_products_are_those_of_aten(counted, transposed):
    a, bias = torch.randn(256, 320), torch.randn(288)
    b = torch.randn(288, 320).t() if transposed else torch.randn(320, 288)
    product = run(call("weft.large_mm", (256, 288), "a", "b"), a, b)
    summed = run(call("weft.large_addmm", (256, 288), "bias", "a", "b"), bias, a, b)
    torch.testing.assert_close(product, a @ b, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(summed, a @ b + bias, atol=1e-4, rtol=1e-4)
    assert len(counted) == 2
    assert product.is_contiguous()
    assert summed.is_contiguous()


def test_small_and_transposed_products_and_other_sums_stay_with_aten(counted):
    a, b, table = torch.randn(256, 256), torch.randn(256, 256), torch.randn(256, 256)
    mm = call("weft.large_mm", (256, 256), "a", "b")
    torch.testing.assert_close(run(mm, a.t(), b), a.t() @ b)
    torch.testing.assert_close(run(mm, a[:, :16], b[:16]), a[:, :16] @ b[:16])
    addmm = call("weft.large_addmm", (256, 256), "c", "a", "b")
    torch.testing.assert_close(run(addmm, table, a, b), torch.addmm(table, a, b))
    wide = torch.randn(1, dtype=torch.float32).expand(256)
    torch.testing.assert_close(run(addmm, wide, a, b), torch.addmm(wide, a, b))
    assert not counted
