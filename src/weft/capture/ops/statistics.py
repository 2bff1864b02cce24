"""Means, variances and losses as sums over the whole batch divided by the whole count or weight.

A mean over a split dimension is not the mean of the ranks' means; a sum is the sum of the ranks'
sums. The counts are those of the logical tensors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._decomp.decompositions import native_batch_norm_backward

from weft.capture.fx.locations import capturing
from weft.capture.fx.private import Function, shapes_of, stands_for
from weft.ops.rules.losses import MEAN, NONE, SUM

aten = torch.ops.aten
TABLE: dict[torch._ops.OpOverload, Callable[..., Any]] = {}


def _dims(x: Tensor, dim: Sequence[int] | int | None) -> list[int]:
    if dim is None or (not isinstance(dim, int) and len(dim) == 0):
        return list(range(x.dim()))
    return [dim] if isinstance(dim, int) else list(dim)


def _count(x: Tensor, dims: Sequence[int]) -> int:
    return math.prod(x.shape[dim] for dim in dims if x.dim())  # a scalar counts as one


@stands_for(TABLE, "mean.default")
def _mean(self: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    return aten.sum.default(self, dtype=dtype) / self.numel()  # type: ignore[no-any-return]


@stands_for(TABLE, "mean.dim")
def _mean_dim(
    self: Tensor,
    dim: Sequence[int] | None,
    keepdim: bool = False,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    dims = _dims(self, dim)
    total = aten.sum.dim_IntList(self, dims, keepdim, dtype=dtype)
    return total / _count(self, dims)  # type: ignore[no-any-return]


def _of_moments(finish: Callable[[Tensor, Tensor], Any]) -> Callable[..., Any]:
    """An op that makes its results of variance and mean."""

    def decomposed(
        self: Tensor, dim: Any = None, *, correction: Any = None, keepdim: bool = False
    ) -> Any:
        if self.is_complex():
            return NotImplemented
        dims = _dims(self, dim)
        count = _count(self, dims)
        mean = self.sum(dims, keepdim=True) / count
        distance = self - mean
        squares = (distance * distance).sum(dims, keepdim=keepdim)
        variance = squares / max(count - (1 if correction is None else correction), 0)
        return finish(variance, mean if keepdim else mean.squeeze(dims))

    return decomposed


for _name, _finish in (
    ("var.correction", lambda variance, _: variance),
    ("var_mean.correction", lambda variance, mean: (variance, mean)),
    ("std.correction", lambda variance, _: variance.sqrt()),
    ("std_mean.correction", lambda variance, mean: (variance.sqrt(), mean)),
):
    stands_for(TABLE, _name)(_of_moments(_finish))


# Batch normalization in training: one functional op when captured, sums over the batch for eager global tensors.
#
# A captured one keeps ATen's fused kernels wherever the batch is whole; where it is split,
# `weft.compiler.decompositions.batch_norm` decomposes it, so that statistics are those of the whole batch.
# Evaluation needs no statistics: those ops stay as they are. Formulas: Ioffe and Szegedy (2015), in
# two passes: first the mean, then the sum of squared distances from it.


@stands_for(TABLE, "native_batch_norm.default")
def _native_batch_norm(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    if not training:
        return NotImplemented
    if not capturing():
        return _taken_apart(input, weight, bias, running_mean, running_var, momentum, eps)
    if running_mean is None or running_var is None:
        return NotImplemented
    # A function of its operands; the casts give statistics of half precision the dtype that the kernels give them.
    out, mean, rstd, *new = aten._native_batch_norm_legit_functional.default(
        input, weight, bias, running_mean, running_var, True, momentum, eps
    )
    running_mean.copy_(new[0])
    running_var.copy_(new[1])
    dtype = running_mean.dtype if weight is None else weight.dtype
    return out, mean.to(dtype), rstd.to(dtype)


@stands_for(TABLE, "_native_batch_norm_legit.default")
def _legit(*args: Any) -> Any:
    found = _native_batch_norm(*args)
    return aten.native_batch_norm.default(*args) if found is NotImplemented else found


@stands_for(TABLE, "_native_batch_norm_legit.no_stats")
def _without_running(
    input: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Any:
    return aten.native_batch_norm.default(input, weight, bias, None, None, training, momentum, eps)


def _taken_apart(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    momentum: float,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    dims, count = [dim for dim in range(x.dim()) if dim != 1], x.numel() // x.shape[1]
    wide = x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
    mean = wide.sum(dims) / count
    distance = wide - _channels(mean, x)
    squares = (distance * distance).sum(dims)
    rstd = torch.rsqrt(squares / count + eps)
    if running_mean is not None:
        _follow(running_mean, mean, momentum)
    if running_var is not None:
        _follow(running_var, squares / (count - 1), momentum)
    out = distance * _channels(rstd, x)
    if weight is not None:
        out = out * _channels(weight, x)
    if bias is not None:
        out = out + _channels(bias, x)
    dtype = mean.dtype if weight is None else weight.dtype  # as the kernels give statistics
    return out.to(x.dtype), mean.to(dtype), rstd.to(dtype)


def _follow(running: Tensor, new: Tensor, momentum: float) -> None:
    running.copy_(running * (1 - momentum) + new * momentum)


@stands_for(TABLE, "native_batch_norm_backward.default")
def _backward(
    grad_out: Tensor,
    input: Tensor,
    weight: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    save_mean: Tensor | None,
    save_invstd: Tensor | None,
    train: bool,
    eps: float,
    output_mask: Sequence[bool],
) -> Any:
    if not train:
        return NotImplemented
    if capturing():
        # In training the running statistics are given, but not read.
        if running_mean is None:
            return NotImplemented
        return aten.native_batch_norm_backward.default(
            grad_out, input, weight, None, None, save_mean, save_invstd, True, eps, output_mask
        )
    return native_batch_norm_backward(
        grad_out,
        input,
        weight,
        running_mean,
        running_var,
        save_mean,
        save_invstd,
        True,
        eps,
        list(output_mask),
    )


def _channels(per_channel: Tensor, like: Tensor) -> Tensor:
    """Shape [C] -> [1, C, 1, ...], to broadcast with `like`."""
    return per_channel.view([1, -1] + [1] * (like.dim() - 2))


def _of_ops(*names: str, **options: Any) -> Callable[[Function], Function]:
    """Let the decorated function stand for ATen ops; it gets the op before the arguments, then `options`."""

    def note(function: Function) -> Function:
        for name in names:
            op = getattr(getattr(aten, name, None), "default", None)
            if op is not None:
                TABLE[op] = partial(function, op, **options)
        return function

    return note


@_of_ops("nll_loss_forward", "nll_loss2d_forward")
def _nll_forward(
    op: Any,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
) -> Any:
    if reduction != MEAN:
        return NotImplemented
    total, total_weight = op(self, target, weight, SUM, ignore_index)
    return total / total_weight, total_weight


@_of_ops("nll_loss_backward", "nll_loss2d_backward")
def _nll_backward(
    op: Any,
    grad_output: Tensor,
    self: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Any:
    if reduction != MEAN:
        return NotImplemented
    grad = grad_output / total_weight
    return op(grad, self, target, weight, SUM, ignore_index, total_weight)


_ELEMENTWISE = (
    *("mse_loss", "smooth_l1_loss", "huber_loss", "soft_margin_loss"),
    *("binary_cross_entropy", "binary_cross_entropy_with_logits"),
)


@_of_ops(*_ELEMENTWISE)
def _elementwise_forward(op: Any, *args: Any, **kwargs: Any) -> Any:
    values, reduction = _without_reduction(op, args, kwargs)
    if reduction == NONE:
        return NotImplemented
    each = op(*values.values())
    return each.sum() / each.numel() if reduction == MEAN else each.sum()


@_of_ops(*(f"{_name}_backward" for _name in _ELEMENTWISE))
def _elementwise_backward(op: Any, *args: Any, **kwargs: Any) -> Any:
    values, reduction = _without_reduction(op, args, kwargs)
    if reduction == NONE:
        return NotImplemented
    operands = values["self"].shape, values["target"].shape
    shape = torch.broadcast_shapes(*operands)  # type: ignore[no-untyped-call]
    grad = values["grad_output"]
    if reduction == MEAN:
        grad = grad / math.prod(shape)
    return op(*{**values, "grad_output": grad.expand(shape)}.values())


@_of_ops("multi_margin_loss", several=False)
@_of_ops("multilabel_margin_loss_forward", several=True)
def _rows_forward(op: Any, *args: Any, several: bool, **kwargs: Any) -> Any:
    """A loss of rows of classes with one target, or `several`; then its backward reads a second result."""
    values, reduction = _without_reduction(op, args, kwargs)
    target = values["target"]
    if reduction == NONE and values["self"].dim() == 2:
        return NotImplemented
    made = op(*_as_rows(values, several).values())
    each, *others = made if isinstance(made, tuple) else (made,)
    found = each.sum() / each.numel() if reduction == MEAN else each.sum()
    if reduction == NONE:
        found = each.reshape(() if several else target.shape)
    return (found, *(one.reshape(target.shape) for one in others)) if others else found


@_of_ops("multi_margin_loss_backward", several=False)
@_of_ops("multilabel_margin_loss_backward", several=True)
def _rows_backward(op: Any, *args: Any, several: bool, **kwargs: Any) -> Any:
    values, reduction = _without_reduction(op, args, kwargs)
    if reduction == NONE and values["self"].dim() == 2:
        return NotImplemented
    rows = _as_rows(values, several)
    count = len(rows["self"])
    grad = values["grad_output"] / count if reduction == MEAN else values["grad_output"]
    made = op(*{**rows, "grad_output": grad.expand(count)}.values())
    return made.reshape(values["self"].shape)


def _as_rows(values: dict[str, Any], several: bool) -> dict[str, Any]:
    """The arguments of a loss with a single row of classes as those of a matrix with one row."""
    if values["self"].dim() == 2:
        return values
    shapes = {"self": (1, -1), "target": (1, -1) if several else (1,), "is_target": (1, -1)}
    return values | {
        name: values[name].reshape(shape) for name, shape in shapes.items() if name in values
    }


def _without_reduction(
    op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], int]:
    """All arguments of a loss by name, with reduction "none", and the reduction that they ask for."""
    schema = op._schema.arguments
    given = {arg.name: value for arg, value in zip(schema, args, strict=False)} | kwargs
    values = {arg.name: given.get(arg.name, arg.default_value) for arg in schema}
    reduction: int = values["reduction"]
    return {**values, "reduction": NONE}, reduction


# Connectionist temporal classification: `weft.ctc_loss`, whose saved table is as wide as the longest target may be.
#
# Torch makes it as wide as the longest target is, which only its lengths tell. Targets that are behind
# one another in a vector become rows of a matrix, so that the batch can be split.


_GIVEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
torch.library.define(
    "weft::ctc_loss", f"({_GIVEN}, int blank, bool zero_infinity) -> (Tensor, Tensor)"
)
torch.library.define(
    "weft::ctc_loss_backward",
    f"(Tensor grad, {_GIVEN}, Tensor losses, Tensor log_alpha, int blank, bool zero_infinity) -> Tensor",
)


@shapes_of("weft::ctc_loss")
def _losses(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    steps, batch, _classes = log_probs.shape
    width = 2 * targets.shape[1] + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, width)


@shapes_of("weft::ctc_loss_backward")
def _gradient(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


def _target_rows(
    targets: Tensor, lengths: Tensor, steps: int, check: bool = False
) -> tuple[Tensor, Tensor]:
    """Targets with shape [n, s], and their lengths.

    No target in a vector needs more places than the number of time steps plus one: longer ones fit in no
    way, nor does that part of them.
    """
    if targets.dim() == 2:
        return targets, lengths
    count = targets.numel()
    if check:
        text = f"ctc_loss: the lengths of targets of shape [{count}] must add up to {count}"
        torch.ops.aten._assert_async.msg(lengths.sum() == count, text)
    width = min(count, steps + 1)
    if not width:
        return targets.new_zeros(len(lengths), 0), lengths
    first = (lengths.cumsum(0) - lengths).unsqueeze(1)
    places = first + torch.arange(width, device=targets.device)
    return targets[places.clamp(max=count - 1)], lengths.clamp(max=width)


@stands_for(TABLE, "_ctc_loss.Tensor")
def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    inputs, lengths = input_lengths.reshape(-1), target_lengths.reshape(-1)
    rows, lengths = _target_rows(targets, lengths, len(log_probs), check=True)
    return torch.ops.weft.ctc_loss(log_probs, rows, inputs, lengths, blank, zero_infinity)


@stands_for(TABLE, "_ctc_loss_backward.Tensor")
def _ctc_loss_backward(
    grad: Tensor,
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    neg_log_likelihood: Tensor,
    log_alpha: Tensor,
    blank: int,
    zero_infinity: bool = False,
) -> Any:
    inputs, lengths = input_lengths.reshape(-1), target_lengths.reshape(-1)
    rows, lengths = _target_rows(targets, lengths, len(log_probs))
    saved = neg_log_likelihood, log_alpha, blank, zero_infinity
    return torch.ops.weft.ctc_loss_backward(grad, log_probs, rows, inputs, lengths, *saved)
