"""Losses with reduction "mean" as a sum divided by the count, or by the total weight, of the whole batch."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.ops.rules.losses import MEAN, NONE, SUM

aten = torch.ops.aten


def _nll_forward(op: Any) -> Callable[..., Any]:
    def decomposed(
        self: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
    ) -> Any:
        if reduction != MEAN:
            return NotImplemented
        total, total_weight = op(self, target, weight, SUM, ignore_index)
        return total / total_weight, total_weight

    return decomposed


def _nll_backward(op: Any) -> Callable[..., Any]:
    def decomposed(
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

    return decomposed


def _elementwise_forward(op: Any) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        values, reduction = _without_reduction(op, args, kwargs)
        if reduction == NONE:
            return NotImplemented
        each = op(*values.values())
        return each.sum() / each.numel() if reduction == MEAN else each.sum()

    return decomposed


def _elementwise_backward(op: Any) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        values, reduction = _without_reduction(op, args, kwargs)
        if reduction == NONE:
            return NotImplemented
        operands = values["self"].shape, values["target"].shape
        shape = torch.broadcast_shapes(*operands)  # type: ignore[no-untyped-call]
        grad = values["grad_output"]
        if reduction == MEAN:
            grad = grad / math.prod(shape)
        return op(*{**values, "grad_output": grad.expand(shape)}.values())

    return decomposed


def _rows_forward(op: Any, several: bool) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
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

    return decomposed


def _rows_backward(op: Any, several: bool) -> Callable[..., Any]:
    def decomposed(*args: Any, **kwargs: Any) -> Any:
        values, reduction = _without_reduction(op, args, kwargs)
        if reduction == NONE and values["self"].dim() == 2:
            return NotImplemented
        rows = _as_rows(values, several)
        count = len(rows["self"])
        grad = values["grad_output"] / count if reduction == MEAN else values["grad_output"]
        made = op(*{**rows, "grad_output": grad.expand(count)}.values())
        return made.reshape(values["self"].shape)

    return decomposed


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


_ELEMENTWISE = (
    "mse_loss",
    "smooth_l1_loss",
    "huber_loss",
    "binary_cross_entropy",
    "binary_cross_entropy_with_logits",
    "soft_margin_loss",
)

TABLE: dict[str, Callable[..., Any]] = {
    "nll_loss_forward.default": _nll_forward(aten.nll_loss_forward.default),
    "nll_loss_backward.default": _nll_backward(aten.nll_loss_backward.default),
    "nll_loss2d_forward.default": _nll_forward(aten.nll_loss2d_forward.default),
    "nll_loss2d_backward.default": _nll_backward(aten.nll_loss2d_backward.default),
    "multi_margin_loss.default": _rows_forward(aten.multi_margin_loss.default, several=False),
    "multi_margin_loss_backward.default": _rows_backward(
        aten.multi_margin_loss_backward.default, several=False
    ),
    "multilabel_margin_loss_forward.default": _rows_forward(
        aten.multilabel_margin_loss_forward.default, several=True
    ),
    "multilabel_margin_loss_backward.default": _rows_backward(
        aten.multilabel_margin_loss_backward.default, several=True
    ),
}
for _name in _ELEMENTWISE:
    TABLE[f"{_name}.default"] = _elementwise_forward(getattr(aten, _name).default)
    if hasattr(aten, f"{_name}_backward"):
        TABLE[f"{_name}_backward.default"] = _elementwise_backward(
            getattr(aten, f"{_name}_backward").default
        )


# Connectionist temporal classification: `weft.ctc_loss`, whose saved table is as wide as the longest target may be.
#
# Torch makes it as wide as the longest target is, which only its lengths tell. Targets that stand behind
# one another in a vector become rows of a matrix, so that the batch can be split.


_GIVEN = "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths"
torch.library.define(
    "weft::ctc_loss", f"({_GIVEN}, int blank, bool zero_infinity) -> (Tensor, Tensor)"
)
torch.library.define(
    "weft::ctc_loss_backward",
    f"(Tensor grad, {_GIVEN}, Tensor losses, Tensor log_alpha, int blank, bool zero_infinity) -> Tensor",
)


def _losses(log_probs: Tensor, targets: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    steps, batch, _classes = log_probs.shape
    width = 2 * targets.shape[1] + 1
    return log_probs.new_empty(batch), log_probs.new_empty(batch, steps, width)


def _gradient(grad: Tensor, log_probs: Tensor, *_: Any) -> Tensor:
    return log_probs.new_empty(log_probs.shape)


torch.library.register_fake("weft::ctc_loss", _losses)
torch.library.register_fake("weft::ctc_loss_backward", _gradient)


def _rows(
    targets: Tensor, lengths: Tensor, steps: int, check: bool = False
) -> tuple[Tensor, Tensor]:
    """Targets as [n, s], and their lengths.

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


def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Tensor,
    target_lengths: Tensor,
    blank: int = 0,
    zero_infinity: bool = False,
) -> Any:
    inputs, lengths = input_lengths.reshape(-1), target_lengths.reshape(-1)
    rows, lengths = _rows(targets, lengths, len(log_probs), check=True)
    return torch.ops.weft.ctc_loss(log_probs, rows, inputs, lengths, blank, zero_infinity)


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
    rows, lengths = _rows(targets, lengths, len(log_probs))
    saved = neg_log_likelihood, log_alpha, blank, zero_infinity
    return torch.ops.weft.ctc_loss_backward(grad, log_probs, rows, inputs, lengths, *saved)


CTC: dict[str, Callable[..., Any]] = {
    "_ctc_loss.Tensor": _ctc_loss,
    "_ctc_loss_backward.Tensor": _ctc_loss_backward,
}
