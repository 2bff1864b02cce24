"""Sample calls of ops on plain tensors; sizes that 2, 3 and 4 divide or leave a remainder."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ops.draw import GENERATOR, aten, b, f, i
from tools.oracles.rules import TorchCall, torch_call

A = torch.ops.aten


def pointwise() -> Iterator[TorchCall]:
    unary = """abs acos acosh alias angle asin asinh atan atanh ceil celu clone contiguous conj_physical
    _conj_physical cos cosh deg2rad detach digamma elu erf erfc erfinv exp exp2 expm1 floor frac gelu
    hardshrink hardsigmoid hardswish hardtanh isfinite isinf isnan isneginf isposinf leaky_relu lgamma
    lift_fresh_copy log log10 log1p log2 log_sigmoid_forward logical_not logit mish nan_to_num neg positive
    rad2deg reciprocal relu relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus
    softshrink sqrt square tan tanh trunc"""
    for name in unary.split():
        yield aten(name, f(5, 4))
    yield aten("bitwise_not", i(9, 5, 4))
    yield aten("round.decimals", f(5, 4), decimals=1)
    yield aten("clamp", f(5, 4), -0.5, 0.5)
    yield aten("clamp_max", f(5, 4), 0.5)
    yield aten("clamp_min", f(5, 4), 0.5)
    yield aten("threshold", f(5, 4), 0.1, 3.0)
    binary = """add.Tensor sub.Tensor mul.Tensor div.Tensor true_divide.Tensor maximum minimum fmax fmin max.other
    min.other atan2 copysign.Tensor fmod.Tensor remainder.Tensor heaviside hypot logaddexp logaddexp2 pow.Tensor_Tensor
    xlogy.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor logical_and logical_or logical_xor
    floor_divide clamp_min.Tensor clamp_max.Tensor rsub.Tensor copy complex polar"""
    for name in binary.split():
        yield aten(name, f(5, 4), f(5, 4))
    for name in ("add.Tensor", "mul.Tensor", "maximum", "div.Tensor"):
        yield aten(name, f(5, 4), f(4))
        yield aten(name, f(5, 1), f(1, 4))
        yield aten(name, f(5, 4), f())
        x = f(5, 4)
        yield aten(name, x, x)
    yield aten("add.Tensor", f(5, 4), f(5, 4), alpha=-2)
    yield aten("div.Tensor_mode", f(5, 4), f(5, 4), rounding_mode="floor")
    yield aten("div.Scalar_mode", f(5, 4), 0.3, rounding_mode="trunc")


def pointwise_scalars() -> Iterator[TorchCall]:
    scalar = """add.Tensor sub.Tensor mul.Tensor div.Tensor add.Scalar sub.Scalar mul.Scalar div.Scalar rsub.Scalar
    copysign.Scalar fmod.Scalar remainder.Scalar pow.Tensor_Scalar xlogy.Scalar_Other eq.Scalar ne.Scalar lt.Scalar
    le.Scalar gt.Scalar ge.Scalar"""
    for name in scalar.split():
        yield aten(name, f(5, 4), 2.0)
    yield aten("add.Tensor", f(5, 4), 0)
    yield aten("pow.Scalar", 2.0, f(5, 4))
    yield aten("xlogy.Scalar_Self", 2.0, f(5, 4))
    yield aten("remainder.Scalar_Tensor", 2.0, f(5, 4))
    for name in ("and", "or", "xor"):
        yield aten(f"bitwise_{name}.Tensor", i(9, 5, 4), i(9, 4))
        yield aten(f"bitwise_{name}.Scalar", i(9, 5, 4), 3)
    for name in ("left", "right"):
        yield aten(f"bitwise_{name}_shift.Tensor", i(9, 5, 4), i(3, 5, 4))
        yield aten(f"bitwise_{name}_shift.Tensor_Scalar", i(9, 5, 4), 2)


def pointwise_others() -> Iterator[TorchCall]:
    yield aten("clamp.Tensor", f(5, 4), f(4), f(5, 4))
    yield aten("where.self", b(5, 4), f(5, 4), f(4))
    yield aten("where.ScalarOther", b(5, 4), f(5, 4), 0.0)
    yield aten("where.ScalarSelf", b(5, 4), 2.0, f(5, 4))
    yield aten("where.Scalar", b(5, 4), 2.0, 1.0)
    yield aten("masked_fill.Scalar", f(5, 4), b(4), 0.0)
    yield aten("masked_fill.Scalar", f(5, 4), b(5, 4), -5.0)
    yield aten("masked_fill.Tensor", f(5, 4), b(5, 4), f())
    yield aten("_to_copy", f(5, 4), dtype=torch.float32)
    yield aten("_to_copy", 3 * f(5, 4), dtype=torch.int64)
    yield aten("_to_copy", i(5, 5, 4), dtype=torch.float64)
    yield aten("_to_copy", i(2, 5, 4), dtype=torch.bool)
    yield torch_call("prims.convert_element_type.default", f(5, 4), torch.float32)
    yield aten("addcmul", f(5, 4), f(5, 4), f(4), value=2.0)
    yield aten("addcdiv", f(5, 4), f(5, 4), f(4), value=2.0)
    yield aten("lerp.Scalar", f(5, 4), f(5, 4), 0.3)
    yield aten("lerp.Tensor", f(5, 4), f(5, 4), f(4))
    yield aten("_prelu_kernel", f(5, 4), f(1, 4))


def pointwise_backward() -> Iterator[TorchCall]:
    g, x = f(5, 4), f(5, 4)
    yield aten("elu_backward", g, 1.0, 1.0, 1.0, False, x)
    for name in ["gelu", "hardsigmoid", "hardswish", "mish", "sigmoid", "silu", "tanh"]:
        yield aten(f"{name}_backward", g, x)
    yield aten("gelu_backward", g, x, approximate="tanh")
    yield aten("hardshrink_backward", g, x, 0.5)
    yield aten("softshrink_backward", g, x, 0.5)
    yield aten("hardtanh_backward", g, x, -1.0, 1.0)
    yield aten("leaky_relu_backward", g, x, 0.1, False)
    yield aten("log_sigmoid_backward", g, x, A.log_sigmoid_forward.default(x)[1])
    yield aten("logit_backward", g, x.sigmoid())
    yield aten("native_dropout_backward", g, b(5, 4), 2.0)
    yield aten("softplus_backward", g, x, 1.0, 20.0)
    yield aten("threshold_backward", g, x, 0)
    yield aten("_prelu_kernel_backward", g, x, f(1, 4))


def views() -> Iterator[TorchCall]:
    for name in ("view", "_unsafe_view", "reshape"):
        yield aten(name, f(12, 5), (3, 4, 5))
        yield aten(name, f(12, 4, 5), (48, 5))
        yield aten(name, f(12, 4, 5), (-1, 5))
        yield aten(name, f(1, 5, 12), (5, 1, 4, 3))
    yield aten("view", f(8, 6, 4), (4, 12, 4))
    yield aten("view", f(), (1, 1))
    yield aten("squeeze", f(5, 1, 4))
    yield aten("squeeze.dim", f(4, 1, 5), 0)
    yield aten("squeeze.dims", f(4, 1, 1, 5), (0, 1, 2))
    yield aten("flatten.using_ints", f(5, 4, 4), 1, 2)
    yield aten("unflatten.int", f(5, 8), 1, (4, 2))
    yield aten("unsqueeze", f(5, 4), 1)
    yield aten("unsqueeze", f(5, 4), -1)
    yield aten("expand", f(5, 1), (3, 5, 4))
    yield aten("expand", f(5, 1), (-1, 4))
    yield aten("broadcast_to", f(5, 1), (5, 4))
    yield aten("permute", f(4, 5, 6), (2, 0, -2))
    yield aten("transpose.int", f(4, 5, 6), 1, -1)
    yield aten("t", f(4, 5))
    yield aten("slice.Tensor", f(5, 6), 0, 1, 4)
    yield aten("slice.Tensor", f(5, 6), 1, 0, 9223372036854775807)
    yield aten("slice.Tensor", f(5, 6), -1, -6)
    yield aten("slice.Tensor", f(5, 6), 1, 0, 6, 2)
    yield aten("slice.Tensor", f(5, 6))
    yield aten("select.int", f(4, 5, 6), 1, -1)
    yield aten("unbind.int", f(3, 5, 6))


def pieces() -> Iterator[TorchCall]:
    yield aten("split.Tensor", f(5, 6), 4, 1)
    yield aten("unsafe_split.Tensor", f(5, 6), 2)
    yield aten("split_with_sizes", f(5, 6), (1, 5), 1)
    yield aten("chunk", f(5, 6), 2, -1)
    yield aten("unsafe_chunk", f(5, 6), 2)
    yield aten("cat", (f(5, 4), f(5, 2)), 1)
    yield aten("cat", (f(5, 4), f(0), f(3, 4)))
    x = f(5, 4)
    yield aten("cat", (x, x), 1)
    yield aten("stack", (f(5, 4), f(5, 4)), 1)
    yield aten("constant_pad_nd", f(5, 4), (1, -1))
    yield aten("constant_pad_nd", f(5, 4, 5), (1, 2, 0, 0), 3.0)
    yield aten("repeat", f(5, 1), (2, 1, 4))
    yield aten("repeat", f(5, 4), (1, 3))
    yield aten("roll", f(5, 4), (1,), (0,))
    yield aten("roll", f(5, 4), (1,))
    yield aten("flip", f(5, 4), (1,))
    yield aten("slice_scatter", f(5, 4), f(5, 2), 1, 1, 3)
    yield aten("select_scatter", f(5, 4), f(5), 1, 2)
    yield aten("slice_backward", f(5, 2), (5, 4), 1, 1, 3, 1)
    yield aten("select_backward", f(5), (5, 4), 1, 2)
    for name in ("tril", "triu"):
        yield aten(name, f(2, 5, 6))
        yield aten(name, f(5, 6), -1)
    yield aten("view_as_complex", f(5, 4, 2))
    yield aten("view_as_real", torch.complex(f(5, 4), f(5, 4)))


def reductions() -> Iterator[TorchCall]:
    for name in ["sum", "mean", "max", "min", "any", "all", "prod", "std", "var"]:
        yield aten(name, f(5, 4))
    yield aten("sum", f())
    for name in ("sum.dim_IntList", "mean.dim", "amax", "amin", "logsumexp"):
        yield aten(name, f(5, 4, 6), (0, -1))
        yield aten(name, f(5, 4, 6), (1,), True)
    yield aten("sum.dim_IntList", i(9, 5, 4), (0,))
    yield aten("sum.dim_IntList", b(5, 4), (0,))
    yield aten("sum.dim_IntList", f(5, 4), ())
    yield aten("sum.dim_IntList", f(5, 4), None, True, dtype=torch.float32)
    yield aten("amax", f(5, 4))
    for name in ["max.dim", "min.dim", "any.dim", "all.dim", "prod.dim_int", "argmax", "argmin"]:
        yield aten(name, f(5, 4), 1)
        yield aten(name, f(5, 4), 0, True)
    yield aten("argmax", f(5, 4))
    yield aten("any.dims", f(5, 4), (1,))
    yield aten("all.dims", f(5, 4), (1,))
    for name in ("var", "std", "var_mean", "std_mean"):
        yield aten(f"{name}.correction", f(5, 4), (1,), correction=0, keepdim=True)
    for name in ("var.dim", "std.dim", "var_mean.dim"):
        yield aten(name, f(5, 4), (1,))
    yield aten("linalg_vector_norm", f(5, 4), 2, (1,))
    yield aten("linalg_vector_norm", f(5, 4))
    yield aten("norm.ScalarOpt_dim", f(5, 4), 2, (1,))
    yield aten("norm.Scalar", f(5, 4), 2)
    for name in ["cumsum", "cumprod", "logcumsumexp", "cummax", "cummin"]:
        yield aten(name, f(5, 4), 1)
    yield aten("argsort", f(5, 4), 0)
    yield aten("sort", f(5, 4))
    yield aten("sort", f(5, 4), 0, True)
    yield aten("topk", f(5, 4), 2)
    yield aten("topk", f(5, 4), 2, 0)
    yield aten("glu", f(5, 8), 1)
    yield aten("glu_backward", f(5, 4), f(5, 8), 1)
    yield aten("_safe_softmax", f(5, 4), -1)
    yield aten("_softmax", f(5, 4), -1, False)
    yield aten("_log_softmax", f(5, 4, 6), 1, False)
    for name in ("_softmax_backward_data", "_log_softmax_backward_data"):
        yield aten(name, f(5, 4), f(5, 4), 1, torch.float64)


def products() -> Iterator[TorchCall]:
    yield aten("mm", f(5, 4), f(4, 6))
    x = f(5, 5)
    yield aten("mm", x, x)
    yield aten("bmm", f(4, 5, 6), f(4, 6, 4))
    yield aten("matmul", f(4, 2, 5, 6), f(4, 2, 6, 3))
    for bias in (f(6), f(5, 6), f(1, 6), f(5, 1), f(1)):
        yield aten("addmm", bias, f(5, 4), f(4, 6), beta=2, alpha=3)
    yield aten("baddbmm", f(4, 5, 6), f(4, 5, 4), f(4, 4, 6))
    yield aten("addmv", f(5), f(5, 4), f(4))
    yield aten("dot", f(5), f(5))
    yield aten("vdot", f(5), f(5))
    yield aten("mv", f(5, 4), f(4))
    yield aten("outer", f(5), f(4))
    yield aten("linear", f(4, 5, 6), f(4, 6))
    yield aten("linear", f(4, 5, 6), f(4, 6), f(4))


def indexing() -> Iterator[TorchCall]:
    for op in (aten, lambda name, *args: torch_call(f"weft.{name}", *args)):
        extra = () if op is aten else (0,)
        yield op("embedding" if op is aten else "embedding_shard", f(6, 4), i(6, 5, 4), *extra)
    yield torch_call("weft.embedding_shard", f(6, 4), i(12, 5, 4), 3)
    yield aten("embedding", f(6, 4), i(6, 5, 4), 2, False, False)
    for scale in (False, True):
        yield aten("embedding_dense_backward", f(5, 4, 6), i(7, 5, 4), 7, 2, scale)
        yield torch_call(
            "weft.embedding_dense_backward_shard", f(5, 4, 6), i(12, 5, 4), 7, 3, -1, scale
        )
    for name in ("index.Tensor", "_unsafe_index.Tensor"):
        yield aten(name, f(5, 6, 4), (None, i(6, 5)))
        yield aten(name, f(5, 6, 4), (i(5, 4, 1), i(6, 5)))
        yield aten(name, f(5, 6, 4), (i(5, 4), None, i(4, 4)))
        yield aten(name, f(5, 6, 4), (None, None, i(4, 4, 5)))
    for name in ("index_put", "_unsafe_index_put"):
        for accumulate in (False, True):
            index = torch.tensor([0, 2, 1, 3, 4]) if not accumulate else i(6, 5)
            yield aten(name, f(5, 6, 4), (None, index), f(5, 5, 4), accumulate)
            yield aten(name, f(5, 6, 4), (None, index), f(), accumulate)
            yield aten(name, f(6, 4), (index,), f(4), accumulate)
    yield aten("index_put", f(5, 4), (b(5, 4),), f(), False)
    yield aten("index_put", f(5, 4), (b(5),), f(), True)
    yield aten("index_select", f(5, 6), 1, i(6, 4))
    yield aten("index_add", f(5, 6), 1, i(6, 4), f(5, 4), alpha=2)
    yield aten("gather", f(5, 6), 1, i(6, 5, 4))
    yield aten("gather", f(5, 6), 0, i(5, 4, 4))
    unique = torch.stack([torch.randperm(6, generator=GENERATOR)[:4] for _ in range(5)])
    yield aten("scatter.src", f(5, 6), 1, unique, f(5, 4))
    yield aten("scatter.src", f(5, 6), 1, unique, f(6, 5))
    yield aten("scatter.value", f(5, 6), -1, i(6, 5, 4), 1.0)
    yield aten("scatter.value", f(5, 6), 1, i(6, 4, 4), 0.0)
    yield aten("scatter_add", f(5, 6), 1, i(6, 5, 4), f(5, 4))
    yield aten("scatter_add", f(5, 6), 1, i(6, 4, 4), f(5, 4))


def factories() -> Iterator[TorchCall]:
    double = {"dtype": torch.float64, "device": torch.device("cpu")}
    yield aten("full", (5, 4), 2.0, **double)
    for name in ("zeros", "ones", "empty.memory_format"):
        yield aten(name, (5, 4), **double)
    for name in ("new_zeros", "new_ones", "new_empty"):
        yield aten(name, f(6), (5, 4))
    yield aten("new_full", f(6), (5, 4), 3.0)
    for name in ("zeros_like", "ones_like", "empty_like", "zero"):
        yield aten(name, f(5, 4))
    yield aten("full_like", f(5, 4), 2.0)
    yield aten("fill.Scalar", f(5, 4), 2.0)
    yield aten("fill.Tensor", f(5, 4), f())
    yield aten("scalar_tensor", 2.0, **double)
    yield aten("eye", 5)
    yield aten("eye.m", 5, 4)
    yield aten("arange", 9, device=torch.device("cpu"))
    yield aten("arange", 4.5)
    yield aten("arange.start", 3, 9, dtype=torch.float64)
    yield aten("arange.start_step", 9, -5, -3)
    yield torch_call("weft.uniform", (5, 4, 6), (0, 0, 0), (5, 4, 6), 3, dtype=torch.float64)
    yield torch_call("weft.uniform", (9, 8), (2, 1), (5, 4), 3, dtype=torch.float64)
    yield torch_call("weft.hint", f(5, 4), "S(0)")


def more_views() -> Iterator[TorchCall]:
    yield aten("diagonal", f(4, 5, 6), 1)
    yield aten("diagonal", f(4, 5, 6), 0, -1, 0)
    yield aten("diagonal_backward", f(5, 4), (4, 5, 6), 0, -1, 0)
    yield aten("diag_embed", f(5, 4))
    yield aten("diag_embed", f(5, 4), 1, 0, 2)
    yield aten("unfold", f(5, 6), 1, 2, 2)
    yield aten("unfold_backward", f(5, 3, 2), (5, 6), 1, 2, 2)


def more_reductions() -> Iterator[TorchCall]:
    yield aten("nansum", f(5, 4), (0,))
    yield aten("count_nonzero", i(2, 5, 4))
    yield aten("count_nonzero.dim_IntList", i(2, 5, 4), (1,))
    yield aten("median.dim", f(5, 4), 1)
    yield aten("kthvalue", f(5, 4), 2, 0)
    yield aten("mode", i(3, 5, 4))
    z = torch.complex(f(5, 4), f(5, 4))
    yield aten("_conj", z)
    yield aten("_fft_r2c", f(5, 4), (1,), 0, True)
    yield aten("_fft_c2c", z, (0,), 0, True)
    yield aten("_fft_c2r", z, (1,), 0, 6)
    yield aten("linalg_cross", f(5, 3), f(5, 3))
    yield aten("linalg_cross", f(3, 5), f(3, 5), dim=0)
    x, y = f(4, 5, 6), f(4, 4, 6)
    yield aten("_cdist_forward", x, y, 2.0, None)
    distances = A._cdist_forward.default(x, y, 2.0, None)
    yield aten("_cdist_backward", f(4, 5, 4), x, y, 2.0, distances)


def more_indexing() -> Iterator[TorchCall]:
    yield aten("index_fill.int_Scalar", f(5, 6), 1, i(6, 4), 0.0)
    yield aten("index_fill.int_Scalar", f(5, 6), 1, i(6, 4), 2.0)
    yield aten("index_copy", f(5, 6), 1, torch.tensor([4, 0, 2]), f(5, 3))
    yield aten("take", f(5, 6), i(30, 4, 5))
    yield aten("bucketize.Tensor", f(5, 4), torch.arange(-1.0, 2.0, dtype=torch.float64))
    sequences = f(5, 6).sort().values
    yield aten("searchsorted.Tensor", sequences[0], f(5, 4))
    yield aten("searchsorted.Tensor", sequences, f(5, 4))
    order = torch.arange(6).expand(5, 6).contiguous()
    yield aten("searchsorted.Tensor", sequences, f(5, 4), sorter=order)


FAMILIES = (
    pointwise, pointwise_scalars, pointwise_others, pointwise_backward, views, pieces, reductions,
    products, indexing, factories, more_views, more_reductions, more_indexing,
)  # fmt: skip
