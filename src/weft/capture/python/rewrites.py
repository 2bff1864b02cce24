"""Functions of torch that behave differently during capture: replaced where the user calls them, above autograd.

Most of them read values to check or to warn, or to find shapes that do not depend on them. If torch checks a
value, the graph checks it in every step (`weft.required`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, final
from unittest.mock import patch

import torch
from torch import Tensor
from torch._decomp.decompositions import affine_grid_generator
from torch.autograd.profiler import record_function
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.modules import batchnorm, transformer
from torch.overrides import TorchFunctionMode

from weft.capture.fx.generators import redirect_calls
from weft.capture.fx.private import Refusal, copy_noted, is_fake, stands_for
from weft.capture.python import unbacked

F = torch.nn.functional
_TABLE = dict(unbacked.TABLE)


@final
class Rewritten(TorchFunctionMode):
    """Within the context, calls of these functions run as what stands for them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        function = _TABLE.get(func)
        found = NotImplemented if function is None else function(*args, **kwargs)
        return func(*args, **kwargs) if found is NotImplemented else found


def require(condition: Tensor, text: str) -> None:
    """Check in every step, in the graph, that a condition is true."""
    torch.ops.aten._assert_async.msg(condition, text)


# -------------------------------------------------------------------------------------- statistics


@stands_for(_TABLE, torch.cov, Tensor.cov)
def _cov(
    input: Tensor,
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Any:
    """`torch.cov`: [variables, observations] to [variables, variables], [observations] to []."""
    x = input.reshape(1, -1) if input.dim() < 2 else input
    weights = [one for one in (fweights, aweights) if one is not None]
    if x.dim() > 2 or x.dtype == torch.bool or not x.shape[1] or not _weigh(x, fweights, aweights):
        return NotImplemented  # torch says what is wrong
    for one in weights:
        require((one >= 0).all(), "cov(): weights cannot be negative")
    weight = weights[0] if len(weights) == 1 else weights[0] * weights[1] if weights else None
    total: Any = x.shape[1] if weight is None else weight.sum()
    if weight is not None:
        require(total != 0, "cov(): weights sum to zero, can't be normalized")
    factor = total - correction
    if weight is not None and aweights is not None and correction:
        factor = total - correction * (weight * aweights).sum() / total
    distance = x - ((x if weight is None else x * weight).sum(1) / total).unsqueeze(1)
    products = distance @ (distance if weight is None else distance * weight).t().conj()
    if isinstance(factor, Tensor):
        least_zero = torch.where(factor <= 0, torch.zeros_like(factor), factor)
    else:
        least_zero = max(factor, 0)
    return (products / least_zero).squeeze()


def _weigh(x: Tensor, frequencies: Tensor | None, weights: Tensor | None) -> bool:
    """True if weights are such as `cov` takes: whole numbers, and any numbers, one for each observation."""
    given = [one for one in (frequencies, weights) if one is not None]
    whole = frequencies is None or not frequencies.is_floating_point()
    broken = weights is None or weights.is_floating_point()
    return whole and broken and all(one.shape == x.shape[1:] for one in given)


@stands_for(_TABLE, torch.corrcoef, Tensor.corrcoef)
def _corrcoef(input: Tensor) -> Any:
    """`torch.corrcoef`: covariances over deviations, between -1 and 1."""
    products = _cov(input)
    if products is NotImplemented:
        return NotImplemented
    if not products.dim():
        return products / products
    deviations = torch.sqrt(products.diag().real if products.is_complex() else products.diag())
    found = products / deviations.view(-1, 1) / deviations.view(1, -1)
    if found.is_complex():
        return torch.complex(found.real.clip(-1, 1), found.imag.clip(-1, 1))
    return found.clip(-1, 1)


# ---------------------------------------------------------------------------------------- indexing


@stands_for(_TABLE, torch.combinations)
def _combinations(input: Tensor, r: int = 2, with_replacement: bool = False) -> Any:
    """`torch.combinations`: the rows of `input` that they choose are known."""
    if input.dim() != 1 or r < 1:
        return NotImplemented
    choose: Any = itertools.combinations
    if with_replacement:
        choose = itertools.combinations_with_replacement
    rows = list(choose(range(len(input)), r))
    index = torch.tensor(rows, dtype=torch.int64, device=input.device)
    return input[index.reshape(len(rows), r)]


@stands_for(_TABLE, torch.narrow, Tensor.narrow)
def _narrow(input: Tensor, dim: int, start: Any, length: int) -> Any:
    """`narrow` from a start that is a tensor: a copy of the same elements, which nobody may write."""
    if not isinstance(start, Tensor) or start.dim() or start.is_floating_point():
        return NotImplemented
    if not -input.dim() <= dim < input.dim() or not 0 <= length <= input.shape[dim]:
        return NotImplemented
    size = input.shape[dim]
    first = torch.where(start < 0, start + size, start)
    inside = (first >= 0) & (first <= size - length)
    require(inside, f"narrow: {length} elements from start exceed dimension {dim} of size {size}")
    first = first.clamp(0, size - length)  # what the check refuses must not read beyond the end
    positions = first + torch.arange(length, device=input.device)
    with copy_noted():
        return input.index_select(dim, positions)


@stands_for(_TABLE, torch.index_put, Tensor.index_put)
def _index_put(
    input: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False
) -> Any:
    """`index_put` at a mask, whose values are as many as their shape says."""
    mask: Any = indices[0] if len(indices) == 1 else None
    if not _is_mask(mask, input) or values.dtype != input.dtype:
        return NotImplemented
    rest = input.shape[mask.dim() :]
    everywhere = mask.reshape(*mask.shape, *[1] * len(rest))
    sizes = zip(values.shape[::-1], rest[::-1], strict=False)
    if values.dim() > len(rest) + 1 or any(size not in (1, whole) for size, whole in sizes):
        return NotImplemented
    if values.dim() > len(rest) and values.shape[0] == 1:
        values = values.reshape(values.shape[1:])
    elif values.dim() > len(rest):
        values = _spread(mask, values)
    return torch.where(everywhere, input + values if accumulate else values, input)


def _spread(mask: Tensor, values: Tensor) -> Tensor:
    """Each of the values where the mask is true, in order; any of them elsewhere."""
    count = values.shape[0]
    text = f"shape mismatch: a mask that gets values of shape {list(values.shape)} must be true at {count} places"
    require(mask.sum() == count, text)
    if not count:
        return values.new_zeros(())
    places = (mask.reshape(-1).cumsum(0) - 1).clamp(0, count - 1)
    return values[places.view(mask.shape)]


@stands_for(_TABLE, torch.index_put_, Tensor.index_put_)
def _index_put_in_place(
    input: Tensor, indices: Sequence[Any], values: Tensor, accumulate: bool = False
) -> Any:
    made = _index_put(input, indices, values, accumulate)
    return made if made is NotImplemented else input.copy_(made)


@stands_for(_TABLE, Tensor.__setitem__)
def _set_item(input: Tensor, key: Any, value: Any) -> Any:
    """`input[mask] = values`."""
    if not isinstance(value, Tensor) or not value.dim():
        return NotImplemented
    made = _index_put(input, [key], value.to(input.dtype))
    return made if made is NotImplemented else input.copy_(made)


def _is_mask(mask: Any, x: Tensor) -> bool:
    of_bools = isinstance(mask, Tensor) and mask.dtype == torch.bool and mask.dim() > 0
    return of_bools and mask.shape == x.shape[: mask.dim()]


@stands_for(_TABLE, torch.tensor_split, Tensor.tensor_split)
def _tensor_split(*args: Any, **kwargs: Any) -> Any:
    if sum(isinstance(value, Tensor) for value in (*args, *kwargs.values())) < 2:
        return NotImplemented
    raise Refusal(
        "tensor_split reads from a tensor where it cuts, so that shapes would depend on values; expected numbers, as "
        "in x.tensor_split([2, 4])"
    )


# ------------------------------------------------------------------------------------------ layers


@stands_for(_TABLE, F.ctc_loss)
def _ctc_loss(
    log_probs: Tensor,
    targets: Tensor,
    input_lengths: Any,
    target_lengths: Any,
    *rest: Any,
    **named: Any,
) -> Any:
    """`ctc_loss` of lengths that are numbers: as of tensors."""
    lengths = [input_lengths, target_lengths]
    if all(isinstance(one, Tensor) for one in lengths):
        return NotImplemented
    device = log_probs.device
    made = [one if isinstance(one, Tensor) else torch.tensor(one, device=device) for one in lengths]
    return F.ctc_loss(log_probs, targets, made[0], made[1], *rest, **named)


@stands_for(_TABLE, F.batch_norm)
def _batch_norm(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: Any = 0.1,
    eps: float = 1e-5,
) -> Any:
    """BatchNorm whose momentum is a tensor [], as for a cumulative average: statistics of the batch, then mixed."""
    if not isinstance(momentum, Tensor):
        return NotImplemented
    buffers = [each for each in (running_mean, running_var) if each is not None]
    if not training or len(buffers) < 2:
        return F.batch_norm(input, running_mean, running_var, weight, bias, training, 0.0, eps)
    mean, var = (torch.zeros_like(each) for each in buffers)
    made = F.batch_norm(input, mean, var, weight, bias, True, 1.0, eps)
    with torch.no_grad():
        for running, now in zip(buffers, (mean, var), strict=True):
            running.copy_(running * (1 - momentum) + now * momentum)
    return made


def _number(value: Any = 0.0) -> Any:
    """`float` of a tensor without data, such as a count of batches: a tensor [], to continue counting with."""
    if isinstance(value, Tensor) and is_fake(value):
        return value.detach().to(torch.float64)
    return float(value)


@stands_for(_TABLE, getattr(F, "linear_cross_entropy", None))
def _linear_cross_entropy(*args: Any, options: Any = None, **named: Any) -> Any:
    """A loss in chunks of rows, of which torch keeps the gradients: as of all rows."""
    return NotImplemented if options is None else F.linear_cross_entropy(*args, **named)


@stands_for(_TABLE, F.scaled_dot_product_attention)
def _attention(*args: Any, **kwargs: Any) -> Any:
    """Attention with dropout goes the plain way, whose mask can be drawn by global position.

    Fused kernels draw masks inside, from seeds that know nothing of layouts.
    """
    if kwargs.get("dropout_p", args[4] if len(args) > 4 else 0.0) <= 0:
        return NotImplemented
    with sdpa_kernel(SDPBackend.MATH):
        return F.scaled_dot_product_attention(*args, **kwargs)


@stands_for(_TABLE, F.affine_grid, torch.affine_grid_generator)
def _affine_grid(theta: Tensor, size: Any, align_corners: bool | None = None) -> Any:
    """A grid with a side of one point: of plain ops, as torch's backward of it writes the number 0 as a constant."""
    if theta.dim() == 3 and len(size) - 1 == theta.shape[2] and 1 in size[2:] and 0 not in size:
        return affine_grid_generator(theta, list(size), bool(align_corners))
    return NotImplemented


@contextmanager
def functions_replaced() -> Iterator[None]:
    """Within the context, torch's own Python does in this thread what a graph can hold.

    `torch.profiler.record_function` does nothing; `nn.BatchNorm*d(momentum=None)` divides by the number of batches in
    the graph; transformers do not look into a mask to see whether it is the causal one, but compute with it, which
    gives the same: `weft.compiler.graph.causal_masks` looks at it in the graph.
    """

    def leaving(leave: Callable[..., Any]) -> Any:
        def left(label: record_function, *error: Any) -> None:
            if label.record is not None:
                leave(label, *error)

        return left

    def hinted(_mask: Any, is_causal: bool | None = None, _size: int | None = None) -> bool:
        return is_causal is True

    with (
        redirect_calls(
            (record_function, "__enter__", lambda _: lambda label: label),
            (record_function, "__exit__", leaving),
            (transformer, "_detect_is_causal_mask", lambda _: hinted),
        ),
        patch.object(batchnorm, "float", _number, create=True),
    ):
        yield
