"""ATen ops that torch does not run well on a rank's tensors: operands in the strides that kernels expect; convolutions
without input channels.

Some kernels read an operand by its pointer, or refuse it, if it has other strides. PyTorch users
never see this, since autograd copies operands before it calls the kernel. A captured step has
these copies only where they did something on whole tensors; on a rank a value may be laid out differently, as boxing
makes tensors contiguous, and element-wise ops keep the strides of their operands. Operands with the right
strides are not copied. `python -m tools.opinfo` runs the calls of every op on operands with other strides, and so
finds the kernels that belong here.

For convolutions without input channels torch returns wrong shapes and no gradient of the bias. A rank has none where
the channels are split along several axes and there are fewer than ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, final

import torch
from torch import Tensor

from weft.ops.kernel_memory import LAYING
from weft.runtime.torch_ops import torch_op

_FORWARD = torch.ops.aten.convolution.default
_BACKWARD = torch.ops.aten.convolution_backward.default


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Tensor:
    """`aten.convolution`; what no input channels make is zero, and the bias."""
    made: Tensor = _FORWARD(x, weight, bias, *rest)
    if x.shape[1]:
        return made
    transposed = rest[3]
    channels = weight.shape[1 if transposed else 0]
    zeros = x.new_zeros((x.shape[0], channels, *made.shape[2:]))
    return zeros if bias is None else zeros.add_(bias.view(-1, *(1,) * (x.dim() - 2)))


def convolution_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    """`aten.convolution_backward`; the gradient of the bias does not depend on the input channels."""
    if x.shape[1]:
        found: tuple[Tensor | None, ...] = _BACKWARD(grad, x, weight, bias_sizes, *rest)
        return found
    mask: Sequence[bool] = rest[-1]
    sums = grad.sum([0, *range(2, grad.dim())]) if mask[2] else None
    return *(
        torch.empty_like(one) if m else None for one, m in zip((x, weight), mask, strict=False)
    ), sums


CONVOLUTION_OPS: dict[str, Callable[..., Any]] = {
    "aten.convolution.default": convolution,
    "aten.convolution_backward.default": convolution_backward,
}


_CHANNELS_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def dense_op(op: str) -> Callable[..., Any]:
    """Torch's op of that name, after what lays its operands where the kernel trusts their strides."""
    lay, function = _LAID.get(op), torch_op(op)
    if op in _ROOMY:
        return lambda *args, **kwargs: _alone(function(*args, **kwargs))
    if lay is None:
        return function

    def laid(*args: Any, **kwargs: Any) -> Any:
        return function(*lay(*args), **kwargs)

    return laid


def _alone(x: Tensor) -> Tensor:
    """`x` in memory that holds nothing else: a mean of losses is in that of the losses."""
    return x.clone() if x.untyped_storage().nbytes() > x.nbytes else x


def _contiguous(*args: Any) -> list[Any]:
    """With the strides of new tensors: others, of dimensions of size 1, kernels take for channels last."""
    return [_laid_in(torch.contiguous_format, x) if isinstance(x, Tensor) else x for x in args]


def _laid_in(form: torch.memory_format, x: Tensor) -> Tensor:
    return _usual(form, x.contiguous(memory_format=form))


def _usual(form: torch.memory_format, x: Tensor) -> Tensor:
    """`x` with the strides that torch gives to new tensors of this format, where `x` is laid out so.

    Strides of dimensions of size 1 may be any, as transposing leaves them: a rank's only image, or row of an image.
    """
    if 1 not in x.shape or not x.is_contiguous(memory_format=form):
        return x
    dims = list(range(x.dim()))
    if form is not torch.contiguous_format:
        dims.append(dims.pop(1))
    strides, reached = [0] * x.dim(), 1
    for dim in reversed(dims):
        strides[dim], reached = reached, reached * x.shape[dim]
    return x if x.stride() == tuple(strides) else x.as_strided(x.shape, strides)


def _format(x: Tensor) -> torch.memory_format:
    """The memory format that kernels of norms want of a tensor: channels last where it is laid out so, on a CPU."""
    last = _CHANNELS_LAST.get(x.dim())
    if x.is_contiguous() or last is None or x.device.type != "cpu":
        return torch.contiguous_format
    return last if x.is_contiguous(memory_format=last) else torch.contiguous_format


def _pairs(x: Tensor) -> list[Any]:
    """Real and imaginary parts side by side, from an even place on."""
    *strides, last = x.stride()
    fits = last == 1 and not any(stride % 2 for stride in strides) and x.storage_offset() % 2 == 0
    return [x if fits else x.clone(memory_format=torch.contiguous_format)]


def _dense_rows(*args: Any) -> list[Any]:
    """Attention on a CPU takes the last dimension as dense, but for the logarithms of sums, which have no depth."""
    return [
        x.contiguous() if isinstance(x, Tensor) and x.dim() == 4 and x.stride(-1) != 1 else x
        for x in args
    ]


def _volumes(*args: Any) -> list[Any]:
    """A volume without a batch has the rank of a batch of images; laid as those with channels last, it is refused."""
    return [_contiguous(x)[0] if isinstance(x, Tensor) and x.dim() == 4 else x for x in args]


# Kernels whose results hold more memory than they have elements.
_ROOMY = frozenset(
    f"aten.{name}.default"
    for name in ("binary_cross_entropy", "col2im", "huber_loss", "mse_loss", "smooth_l1_loss")
) | {"aten.soft_margin_loss.default"}

Lay = Callable[..., list[Any]]


_SPECIAL: dict[str, Lay] = {
    **{
        # Such a kernel copies all memory of the first operand, of which it may be a part.
        f"aten.{name}": lambda x, *rest: [_alone(x), *rest]
        for name in ("copy.default", "select_scatter.default", "slice_scatter.default")
    },
    # It takes both to be laid out alike where each is dense, and tells by strides that mean nothing how they are laid
    # out.
    "aten.native_batch_norm_backward.default": lambda grad, x, *rest: [
        *(_usual(_format(one), one) for one in (grad, x)),
        *rest,
    ],
    "aten.native_group_norm.default": lambda x, *rest: [
        _laid_in(_format(x), x),
        *_contiguous(*rest),
    ],
    # It takes both as `x` lies.
    "aten.native_group_norm_backward.default": lambda grad, x, *rest: [
        *(_laid_in(_format(x), one) for one in (grad, x)),
        *_contiguous(*rest),
    ],
    "aten.view_as_complex.default": _pairs,
    "aten._scaled_dot_product_flash_attention_for_cpu.default": _dense_rows,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward.default": _dense_rows,
    "aten.max_pool3d_with_indices.default": _volumes,
    "aten.max_pool3d_with_indices_backward.default": _volumes,
}
_LAID = {**dict.fromkeys(LAYING, _contiguous), **_SPECIAL}


# Large products of float32 matrices on the CPU: oneDNN's kernel where ATen's would call BLAS.
#
# With AVX-512, `mkldnn._linear_pointwise` (what Inductor calls for linear layers) takes 4 to 47 % less
# time than BLAS (MKL on an EPYC) from some 256³ on, most with a large second operand; below, its 15
# µs a call decide. Which one runs depends on shapes and on the CPU alone (`weft.compiler.plans.specialize`), so
# equal ranks sum in the same order.
#
# Products that are summed over micro-batches are added to the sum as they are computed, by BLAS
# itself (`weft.compiler.plans.specialize` joins them).


# From so many multiplications on, which are known when it runs.
_LARGE = 2**24


def large_mm(a: Tensor, b: Tensor) -> Tensor:
    """`a @ b`; shapes [m, k] and [k, n], float32."""
    if _fits(a, b):
        product: Tensor = _linear()(a, b.t(), None, "none", [], "")
        return product
    return torch.mm(a, b)


def large_addmm(bias: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`bias + a @ b`; shapes [n], [m, k] and [k, n], float32."""
    if _fits(a, b) and bias.dim() == 1 and bias.shape[0] == b.shape[1] and bias.stride(0) == 1:
        product: Tensor = _linear()(a, b.t(), bias, "none", [], "")
        return product
    return torch.addmm(bias, a, b)


def _fits(a: Tensor, b: Tensor) -> bool:
    """True if oneDNN is faster: not with a transposed first operand, as gradients of weights have."""
    return a.stride(1) == 1 and a.shape[0] * b.numel() >= _LARGE


@cache
def onednn_is_faster() -> bool:
    """True if this CPU and this torch have the kernel."""
    known = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # not where torch lacks oneDNN
    return known and torch.backends.cpu.get_cpu_capability() == "AVX512"


@cache
def _linear() -> Callable[..., Any]:
    linear: Callable[..., Any] = torch.ops.mkldnn._linear_pointwise.default
    return linear


MATMUL_OPS: dict[str, Callable[..., Any]] = {
    "weft.large_mm": large_mm,
    "weft.large_addmm": large_addmm,
}


SUMMED_PRODUCT = "weft.accumulate_mm"


@final
class SumOfProducts:
    """`weft.accumulate_mm(a, b)`: the sum of `a @ b` over the micro-batches."""

    def __init__(self, micro_batches: int, owned: bool = True) -> None:
        self._last = micro_batches - 1
        # The sum so far; None between steps.
        self._total: Tensor | None = None

    def __call__(self, micro: int, a: Tensor, b: Tensor, /) -> Tensor:
        total = self._total
        total = torch.mm(a, b) if total is None else total.addmm_(a, b)
        self._total = None if micro == self._last else total
        return total
