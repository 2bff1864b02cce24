"""Sample calls on small tensors for every registered op; sizes that 2, 3 and 4 divide or leave a remainder."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from weft.runtime.check_rules import TorchCall, torch_call

A = torch.ops.aten
_generator = torch.Generator().manual_seed(7)

# Rules that cannot run here, with the reason.
NOT_RUN = {"aten._fused_rms_norm_backward.default": "runs on CUDA only"}
NOT_RUN |= {
    f"aten._scaled_dot_product_{kernel}{direction}.default": "runs on CUDA only"
    for kernel in ("flash_attention", "efficient_attention", "cudnn_attention")
    for direction in ("", "_backward")
} | {
    f"aten._scaled_dot_product_fused_attention_overrideable{direction}.default": "needs a back end"
    for direction in ("", "_backward")
}


def f(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=_generator, dtype=torch.float64)


def i(high: int, *shape: int) -> torch.Tensor:
    return torch.randint(high, shape, generator=_generator)


def b(*shape: int) -> torch.Tensor:
    return torch.rand(shape, generator=_generator) < 0.5


def aten(name: str, *args: object, **kwargs: object) -> TorchCall:
    return torch_call(f"aten.{name}" if "." in name else f"aten.{name}.default", *args, **kwargs)


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


def normalizations() -> Iterator[TorchCall]:
    x, w, bias, g = f(4, 5, 6), f(6), f(6), f(4, 5, 6)
    for weight, shift in ((w, bias), (None, None), (w, None)):
        yield aten("native_layer_norm", x, (6,), weight, shift, 1e-5)
        _, mean, rstd = A.native_layer_norm.default(x, (6,), weight, shift, 1e-5)
        mask = (True, weight is not None, shift is not None)
        yield aten("native_layer_norm_backward", g, x, (6,), mean, rstd, weight, shift, mask)
    yield aten("native_layer_norm", x, (5, 6), None, None, 1e-5)
    yield aten("_fused_rms_norm", x, (6,), w, 1e-5)

    yield from _group_norm(f(4, 12, 5), 4)
    yield from _group_norm(f(5, 5, 2, 3), 5)
    yield from _batch_norm()


def _group_norm(x: torch.Tensor, groups: int) -> Iterator[TorchCall]:
    n, c, *space = x.shape
    size = torch.Size(space).numel()
    w, bias, g = f(c), f(c), f(*x.shape)
    yield aten("native_group_norm", x, w, bias, n, c, size, groups, 1e-5)
    yield aten("native_group_norm", x, None, None, n, c, size, groups, 1e-5)
    _, mean, rstd = A.native_group_norm.default(x, w, bias, n, c, size, groups, 1e-5)
    mask = (True, True, True)
    yield aten("native_group_norm_backward", g, x, mean, rstd, w, n, c, size, groups, mask)


def _batch_norm() -> Iterator[TorchCall]:
    x, w, bias, g, mean = f(5, 4, 4, 5), f(4), f(4), f(5, 4, 4, 5), f(4)
    var = f(4).exp()
    yield aten("_native_batch_norm_legit_no_training", x, w, bias, mean, var, 0.1, 1e-5)
    for training in (True, False):
        yield aten("native_batch_norm", x, w, bias, mean.clone(), var.clone(), training, 0.0, 1e-5)
        yield aten(
            "_native_batch_norm_legit_functional", x, w, bias, mean, var, training, 0.1, 1e-5
        )
        saved = A.native_batch_norm.default(x, w, bias, mean, var, training, 0.0, 1e-5)[1:]
        mask = (True, True, True)
        yield aten("native_batch_norm_backward", g, x, w, mean, var, *saved, training, 1e-5, mask)


def losses() -> Iterator[TorchCall]:
    x, t, g = f(5, 4), f(5, 4), f(5, 4)
    p, q = x.sigmoid(), t.sigmoid()
    for reduction in (0, 1, 2):
        gradient = g if reduction == 0 else f()
        yield aten("mse_loss", x, t, reduction)
        yield aten("mse_loss_backward", gradient, x, t, reduction)
        yield aten("soft_margin_loss", x, t.sign(), reduction)
        yield aten("soft_margin_loss_backward", gradient, x, t.sign(), reduction)
        for name in ("smooth_l1_loss", "huber_loss"):
            yield aten(name, x, t, reduction, 0.7)
            yield aten(f"{name}_backward", gradient, x, t, reduction, 0.7)
        yield aten("binary_cross_entropy", p, q, f(4).exp(), reduction)
        yield aten("binary_cross_entropy", p, q, None, reduction)
        yield aten("binary_cross_entropy_with_logits", x, q, None, f(4).exp(), reduction)
        yield aten("binary_cross_entropy_backward", gradient, p, q, None, reduction)
        yield from _nll("nll_loss", f(5, 4), i(4, 5), reduction)
        yield from _nll("nll_loss2d", f(5, 4, 6, 4), i(4, 5, 6, 4), reduction)


def _nll(
    name: str, scores: torch.Tensor, target: torch.Tensor, reduction: int
) -> Iterator[TorchCall]:
    target.view(-1)[0] = -100
    for weight in (None, f(4).exp()):
        args = (scores, target, weight, reduction, -100)
        yield aten(f"{name}_forward", *args)
        output, total = getattr(A, f"{name}_forward").default(*args)
        yield aten(f"{name}_backward", torch.ones_like(output), *args, total)


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
    yield aten("index_select", f(5, 6), 1, i(6, 4))
    yield aten("index_add", f(5, 6), 1, i(6, 4), f(5, 4), alpha=2)
    yield aten("gather", f(5, 6), 1, i(6, 5, 4))
    yield aten("gather", f(5, 6), 0, i(5, 4, 4))
    unique = torch.stack([torch.randperm(6, generator=_generator)[:4] for _ in range(5)])
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


def attention() -> Iterator[TorchCall]:
    name = "_scaled_dot_product_flash_attention_for_cpu"
    q, k, v, g = f(4, 5, 6, 8), f(4, 5, 6, 8), f(4, 5, 6, 8), f(4, 5, 6, 8)
    short, few = f(4, 5, 4, 8), f(4, 1, 6, 8)
    masks = (None, f(6, 6), f(4, 1, 6, 6), f(1, 1, 6, 6), f(4, 5, 6, 6))
    cases = [(q, k, v, False, mask) for mask in masks]
    cases += [(q, k, v, True, None), (q, short, short, False, None), (q, few, few, False, None)]
    for query, key, value, causal, mask in cases:
        if key is few:
            key, value = key.expand(4, 5, 6, 8), value.expand(4, 5, 6, 8)
        options = {} if mask is None else {"attn_mask": mask, "scale": 0.3}
        yield aten(name, query, key, value, 0.0, causal, **options)
        out, lse = getattr(A, name).default(query, key, value, 0.0, causal, **options)
        yield aten(f"{name}_backward", g, query, key, value, out, lse, 0.0, causal, **options)


def convolutions() -> Iterator[TorchCall]:
    plain = ((1, 1), (1, 1), (1, 1))
    yield from _convolution(f(5, 4, 6, 6), f(6, 4, 3, 3), False, 1, plain)
    yield from _convolution(f(5, 4, 6, 6), f(4, 6, 3, 3), True, 1, plain)
    yield from _convolution(f(5, 12, 6, 6), f(24, 3, 3, 3), False, 4, plain)
    yield from _convolution(f(5, 5, 6, 6), f(5, 1, 3, 3), False, 5, plain)
    yield from _convolution(f(5, 12, 6, 6), f(12, 2, 3, 3), True, 4, plain)
    yield from _convolution(f(5, 4, 9), f(6, 4, 3), False, 1, ((2,), (0,), (1,)))


def _convolution(
    x: torch.Tensor, w: torch.Tensor, transposed: bool, groups: int, plain: tuple[object, ...]
) -> Iterator[TorchCall]:
    rest = (*plain, transposed, (0,) * (x.dim() - 2), groups)
    outer = w.shape[1] * groups if transposed else w.shape[0]
    yield aten("convolution", x, w, f(outer), *rest)
    yield aten("convolution", x, w, None, *rest)
    g = f(*A.convolution.default(x, w, None, *rest).shape)
    yield aten("convolution_backward", g, x, w, (outer,), *rest, (True, True, True))
    yield aten("convolution_backward", g, x, w, None, *rest, (True, True, False))
    yield aten("convolution_backward", g, x, w, (outer,), *rest, (False, True, True))


def pooling() -> Iterator[TorchCall]:
    x = f(5, 4, 6, 6)
    window = ((3, 3), (2, 2), (1, 1))
    for image in (x, x[0]):
        yield aten("max_pool2d_with_indices", image, *window)
        out, indices = A.max_pool2d_with_indices.default(image, *window)
        yield aten(
            "max_pool2d_with_indices_backward",
            f(*out.shape), image, *window, (1, 1), False, indices,
        )  # fmt: skip
    yield aten("avg_pool2d", x, *window)
    out = A.avg_pool2d.default(x, *window)
    yield aten("avg_pool2d_backward", f(*out.shape), x, *window, False, True, None)
    yield aten("_adaptive_avg_pool2d", x, (2, 3))
    yield aten("_adaptive_avg_pool2d_backward", f(5, 4, 2, 3), x)
    yield aten("avg_pool1d", f(5, 4, 6), (2,))
    yield aten("adaptive_avg_pool1d", f(5, 4, 6), (3,))
    yield aten("upsample_nearest2d", x, (12, 12))
    yield aten("upsample_nearest2d_backward", f(5, 4, 12, 12), (12, 12), (5, 4, 6, 6))
    yield aten("upsample_bilinear2d", x, (12, 12), False)
    yield aten("upsample_bilinear2d_backward", f(5, 4, 12, 12), (12, 12), (5, 4, 6, 6), False)


def more_pooling() -> Iterator[TorchCall]:
    x, y = f(5, 4, 6, 6), f(5, 4, 4, 4, 4)
    out, indices = A.adaptive_max_pool2d.default(x, (2, 3))
    yield aten("adaptive_max_pool2d", x, (2, 3))
    yield aten("adaptive_max_pool2d_backward", f(*out.shape), x, indices)
    out, indices = A.adaptive_max_pool3d.default(y, (2, 3, 2))
    yield aten("adaptive_max_pool3d", y, (2, 3, 2))
    yield aten("adaptive_max_pool3d_backward", f(*out.shape), y, indices)
    window = ((2, 2, 2), (2, 2, 2), (0, 0, 0))
    out, indices = A.max_pool3d_with_indices.default(y, *window)
    yield aten("max_pool3d_with_indices", y, *window)
    rest = (*window, (1, 1, 1), False, indices)
    yield aten("max_pool3d_with_indices_backward", f(*out.shape), y, *rest)
    yield aten("avg_pool3d", y, *window)
    yield aten("avg_pool3d_backward", f(*out.shape), y, *window, False, True, None)
    yield aten("_adaptive_avg_pool3d", y, (2, 3, 2))
    yield aten("_adaptive_avg_pool3d_backward", f(5, 4, 2, 3, 2), y)


def padding() -> Iterator[TorchCall]:
    for dims in (1, 2, 3):
        x, pad = f(5, 4, *(4,) * dims), (1,) * (2 * dims)
        for name in (f"reflection_pad{dims}d", f"replication_pad{dims}d"):
            yield aten(name, x, pad)
            yield aten(f"{name}_backward", f(5, 4, *(6,) * dims), x, pad)
    yield aten("pixel_shuffle", f(5, 4, 3, 3), 2)
    yield aten("pixel_unshuffle", f(5, 4, 4, 4), 2)
    window = ((2, 2), (1, 1), (0, 0), (1, 1))
    yield aten("im2col", f(5, 4, 5, 5), *window)
    yield aten("col2im", f(5, 16, 16), (5, 5), *window)


FAMILIES = (
    pointwise, pointwise_scalars, pointwise_others, pointwise_backward, views, pieces, reductions,
    products, normalizations, losses, indexing, factories, attention, convolutions, pooling, more_pooling,
    padding,
)  # fmt: skip
