"""Segments as generated functions."""

from __future__ import annotations

import math
import traceback

import pytest
import torch

from build import call, ref
from weft.ir.alias import view_bases
from weft.ops.call import Token
from weft.runtime.kernels.dense_operands import dense_op
from weft.runtime.kernels.generated import CutCalls, build_kernel, failed_op

CPU = torch.device("cpu")


def test_source_deletes_values_after_their_last_use():
    calls = (
        call("aten.add.Tensor", (ref("x"), ref("w.1")), "a"),
        call("aten.mul.Tensor", (ref("a"), 2.0), "b"),
        call("aten.neg.default", (ref("b"),), "unused"),
        call("aten.sub.Tensor", (ref("b"), ref("x")), "c"),
    )
    kernel = build_kernel(calls, ("c", "b"), CPU)
    assert kernel.inputs == ("x", "w.1")
    assert kernel.source == (
        "def segment(draw, a0, a1):\n"
        "    v2 = aten_add_Tensor(a0, a1)\n"
        "    del a1\n"
        "    v3 = aten_mul_Tensor(v2, 2.0)\n"
        "    del v2\n"
        "    v4 = aten_neg_default(v3)\n"
        "    del v4\n"
        "    v5 = aten_sub_Tensor(v3, a0)\n"
        "    del a0\n"
        "    return (v5, v3, )\n"
    )
    c, b = kernel.function(None, torch.ones(2), torch.ones(2))
    assert (c.tolist(), b.tolist()) == ([3, 3], [4, 4])


def test_equal_segments_share_their_code():
    kernels = [
        build_kernel((call("aten.neg.default", (ref(name),), f"{name}!"),), (f"{name}!",), CPU)
        for name in ("p", "q")
    ]
    assert kernels[0].function.__code__ is kernels[1].function.__code__
    assert kernels[0].outputs == ("p!",)


def test_several_results_lists_and_results_that_are_no_tensors():
    calls = (
        call("aten.native_layer_norm.default", (ref("x"), (2,), None, None, 1e-5), "n", None, None),
        call("aten.split.Tensor", (ref("x"), 4), "whole"),
        call("aten.unbind.int", (ref("x"),), "r", None),
        call("aten.cat.default", ((ref("n"), ref("whole")), 0), "c"),
    )
    kernel = build_kernel(calls, ("c", "r"), CPU)
    x = torch.tensor([[1.0, 3.0], [0.0, 4.0]])
    c, r = kernel.function(None, x)
    torch.testing.assert_close(c, torch.cat([torch.nn.functional.layer_norm(x, (2,)), x]))
    assert torch.equal(r, x[0])


def test_constants_of_torch_and_odd_numbers():
    dtype, device = Token("dtype", "float64"), Token("device", "cpu")
    calls = (
        call("aten.full.default", ((2,), -math.inf), "i", dtype=dtype, device=device),
        call("aten.full.default", ((2,), math.nan), "n", dtype=dtype),
        call("aten.clone.default", (ref("x"),), "k", memory_format=Token("memory_format", "contiguous_format")),
    )  # fmt: skip
    i, n, k = build_kernel(calls, ("i", "n", "k"), CPU).function(None, torch.ones(2))
    assert i.dtype == torch.float64
    assert (i == -math.inf).all()
    assert n.isnan().all()
    assert k.is_contiguous()


def test_random_numbers_come_from_the_caller():
    calls = (call("weft.uniform", ((4,), (1,), (2,), 7), "u", dtype=Token("dtype", "float32")),)

    def draw(size, offset, length, salt, dtype):
        assert (size, offset, salt, dtype) == ([4], [1], 7, torch.float32)
        return torch.zeros(length)

    assert build_kernel(calls, ("u",), CPU).function(draw)[0].tolist() == [0, 0]


def test_a_traceback_shows_the_failing_call():
    kernel = build_kernel((call("aten.mm.default", (ref("x"), ref("x")), "y"),), ("y",), CPU)
    with pytest.raises(RuntimeError) as caught:
        kernel.function(None, torch.ones(2, 3))
    text = "".join(traceback.format_exception(caught.type, caught.value, caught.tb))
    assert "v1 = aten_mm_default(a0, a0)" in text


def test_the_op_that_failed_is_known():
    calls = (
        call("aten.t.default", (ref("x"),), "t"),
        call("aten.mm.default", (ref("x"), ref("x")), "y"),
        call("aten.neg.default", (ref("t"),), "n"),
    )
    kernel = build_kernel(calls, ("y", "n"), CPU)
    with pytest.raises(RuntimeError) as caught:
        kernel.function(None, torch.ones(2, 3))
    assert failed_op(caught.value, calls) == "aten.mm.default"
    assert failed_op(ValueError(), calls) == ""


def test_copied_outputs_and_aliases():
    calls = (
        call("aten.t.default", (ref("w"),), "t"),
        call("weft.slice", (ref("t"), 0, 0, 1), "s"),
        call("aten.neg.default", (ref("s"),), "n"),
    )
    assert view_bases(calls) == {"t": "w", "s": "w"}
    w = torch.ones(2, 2)
    t, s = build_kernel(calls, ("t", "s"), CPU, copied={"s"}).function(None, w)
    w.zero_()
    assert not t.any()
    assert s.all()


def test_a_gradient_with_one_row_may_have_any_stride_there() -> None:
    """What transposing leaves along a dimension of size 1 looks like channels last to torch's pooling of volumes."""
    x = torch.arange(180.0).reshape(2, 3, 6, 5)
    out, places = torch.ops.aten.max_pool3d_with_indices(x, 3, 2, 0, 1, True)
    grad = torch.rand(out.shape).as_strided(out.shape, (6, 1, 2, 1))
    function = dense_op("aten.max_pool3d_with_indices_backward.default")
    right = torch.ops.aten.max_pool3d_with_indices_backward(
        grad.clone(memory_format=torch.contiguous_format), x, 3, 2, 0, 1, True, places
    )
    assert torch.equal(function(grad, x, 3, 2, 0, 1, True, places), right)


def loss_calls():
    """Logits, log-probabilities and the gradient of the logits."""
    return (
        call("aten.mm.default", (ref("x"), ref("w")), "logits", shape=(3, 4)),
        call("aten._log_softmax.default", (ref("logits"), 1, False), "scores", shape=(3, 4)),
        call(
            "weft.cross_entropy_backward",
            (ref("one"), ref("scores"), ref("y"), None, 2, -100, ref("one")),
            "grad",
            shape=(3, 4),
        ),
    )


def test_a_loss_is_written_over_its_logits():
    x, w, one, y = torch.randn(3, 5), torch.randn(5, 4), torch.ones(()), torch.tensor([0, 3, 1])
    kernel = build_kernel(loss_calls(), ("grad",), CPU)
    assert [name in kernel.source for name in ("softmax_default_over(", "backward_over(")] == [1, 1]
    (found,) = kernel.function(
        None, *({"x": x, "w": w, "one": one, "y": y}[n] for n in kernel.inputs)
    )
    logits = (x @ w).requires_grad_()
    torch.nn.functional.cross_entropy(logits, y, reduction="sum").backward()
    torch.testing.assert_close(found, logits.grad)
    both = build_kernel(loss_calls(), ("grad", "scores"), CPU)
    assert [name in both.source for name in ("softmax_default_over(", "backward_over(")] == [1, 0]


def test_what_a_compiled_part_has_made_is_not_written_over():
    product, *others = loss_calls()
    part = call("part", product.args, "logits", shape=(3, 4))
    cut = CutCalls((part, *others), {"part": lambda inputs: [torch.mm(*inputs)]})
    source = build_kernel(loss_calls(), ("grad",), CPU, cut=cut).source
    assert [name in source for name in ("softmax_default_over(", "backward_over(")] == [0, 1]
