"""What weft's own ops mean, written for clarity; the kernels that run them stand elsewhere."""

from __future__ import annotations

from typing import Any

import torch

from weft.runtime.kernels.dense_operands import CONVOLUTION_OPS
from weft.runtime.kernels.layer_ops import NORM_OPS
from weft.runtime.kernels.local_ops import blank, lstsq, slice_
from weft.runtime.kernels.loss_ops import ctc_loss, ctc_loss_backward
from weft.runtime.kernels.own_ops import TIME_OPS, next_scale


def attention_rows(
    query: Any, key: Any, value: Any, offset: int, scale: float | None = None
) -> tuple[Any, Any]:
    """`weft.attention_rows`: all scores, a mask by positions, a softmax."""
    group = query.shape[1] // key.shape[1]
    key, value = (one.repeat_interleave(group, 1) for one in (key, value))
    scores = query @ key.transpose(2, 3) * (scale or query.shape[3] ** -0.5)
    positions = torch.arange(offset, offset + query.shape[2]).unsqueeze(1)
    scores = scores.masked_fill(torch.arange(key.shape[2]) > positions, -torch.inf)
    return scores.softmax(3) @ value, scores.logsumexp(3)


def attention_rows_backward(
    grad: Any,
    query: Any,
    key: Any,
    value: Any,
    output: Any,
    logsumexp: Any,
    offset: int,
    scale: Any = None,
) -> tuple[Any, ...]:
    """`weft.attention_rows_backward` by autograd."""
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in (query, key, value)]
        found, _ = attention_rows(leaves[0], leaves[1], leaves[2], offset, scale)
        gradients: tuple[Any, ...] = torch.autograd.grad(found, leaves, grad)
    return gradients


def segments(offs: Any, rows: int, first: int) -> Any:
    """`weft.segments`: the first expert whose rows end behind each row."""
    ends = offs.tolist()
    return torch.tensor([sum(end <= i for end in ends) for i in range(first, first + rows)])


def expert_mm(x: Any, w: Any, ids: Any, offset: int) -> Any:
    """`weft.expert_mm` row by row."""
    made = x.new_zeros(*ids.shape, w.shape[2])
    for place, expert in _pairs(ids, w.shape[0], offset):
        made[place] = x[place] @ w[expert]
    return made


def expert_gradient(x: Any, g: Any, ids: Any, experts: int, offset: int) -> Any:
    """`weft.expert_gradient` row by row."""
    made = x.new_zeros(experts, x.shape[-1], g.shape[-1])
    for place, expert in _pairs(ids, experts, offset):
        made[expert] += torch.outer(x[place], g[place])
    return made


def _pairs(ids: Any, experts: int, offset: int) -> list[tuple[tuple[int, ...], int]]:
    """The place of each row that has a matrix, and which."""
    each = experts // ids.shape[0] if ids.dim() == 2 else experts
    found = []
    for place in (
        torch.cartesian_prod(*map(torch.arange, ids.shape)).reshape(-1, ids.dim()).tolist()
    ):
        own = int(ids[tuple(place)]) - offset
        if 0 <= own < each:
            found.append((tuple(place), own + (each * place[0] if ids.dim() == 2 else 0)))
    return found


def routes(ids: Any, experts: int, groups: int, blocks: int, capacity: int) -> Any:
    """`weft.routes`: rows of a group take the places of their block in the order of their experts."""
    made, rows = torch.full_like(ids, -1), len(ids) // groups
    for group in range(groups):
        taken = [0] * blocks
        # Sorting is stable: the rows of an expert stay in order.
        for row in sorted(range(group * rows, (group + 1) * rows), key=lambda row: int(ids[row])):
            if 0 <= ids[row] < experts:
                block = int(ids[row]) // (experts // blocks)
                made[row] = block * capacity + taken[block]
                taken[block] += 1
    return made


def dispatch(
    x: Any,
    places: Any,
    groups: int,
    blocks: int,
    capacity: int,
    around: int,
    first: int,
    each: int,
) -> Any:
    """`weft.dispatch` row by row."""
    made = x.new_full((blocks, groups * capacity, *x.shape[1:]), around)
    for row, block, column in _targets(places, groups, capacity, first):
        if 0 <= block < blocks:
            made[block, column] = x[row // each]
    return made


def combine(z: Any, places: Any, groups: int, capacity: int, first: int, each: int) -> Any:
    """`weft.combine` row by row."""
    made = z.new_zeros(len(places) // each, *z.shape[2:])
    for row, block, column in _targets(places, groups, capacity, first):
        if 0 <= block < len(z):
            made[row // each] += z[block, column]
    return made


def _targets(places: Any, groups: int, capacity: int, first: int) -> list[tuple[int, int, int]]:
    rows = len(places) // groups
    return [
        (row, place // capacity - first, row // rows * capacity + place % capacity)
        for row, place in enumerate(places.tolist())
        if place >= 0
    ]


CHECKS: dict[str, Any] = {
    "weft.segments": segments,
    "weft.expert_mm": expert_mm,
    "weft.expert_gradient": expert_gradient,
    "weft.routes": routes,
    "weft.dispatch": dispatch,
    "weft.combine": combine,
}


def nll_shard(
    scores: Any, target: Any, weight: Any, reduction: int, ignored: int, offset: int
) -> Any:
    """The scores stand among the others, which are zero, as are their weights."""
    whole, weights = _among_all(scores, target, weight, offset)
    op = torch.ops.aten.nll_loss2d_forward if scores.dim() == 4 else torch.ops.aten.nll_loss_forward
    return op.default(whole, target, weights, reduction, ignored)


def nll_gradient_shard(
    gradient: Any, scores: Any, target: Any, weight: Any, reduction: int, ignored: int, *rest: Any
) -> Any:
    """The shard's part of the gradient of all scores; `rest` is the total weight and the offset."""
    total, offset = rest
    whole, weights = _among_all(scores, target, weight, offset)
    aten = torch.ops.aten
    op = aten.nll_loss2d_backward if scores.dim() == 4 else aten.nll_loss_backward
    found = op.default(gradient, whole, target, weights, reduction, ignored, total)
    dim = min(1, scores.dim() - 1)
    return found.narrow(dim, offset, scores.shape[dim])


def class_loss(
    x: Any, lse: Any, target: Any, reduction: int, ignored: int, offset: int
) -> tuple[Any, Any]:
    """The shard's losses of log-probabilities; targets are counted where losses are summed."""
    losses, count = nll_shard(x - lse, target, None, reduction, ignored, offset)
    return losses, count if reduction else torch.zeros_like(count)


def class_loss_gradient(
    gradient: Any, x: Any, lse: Any, target: Any, reduction: int, ignored: int, offset: int
) -> Any:
    """Probabilities, less one at the target, in rows that are not ignored."""
    classes = torch.arange(offset, offset + x.shape[1], device=x.device)
    chosen = (classes == target.unsqueeze(1)).to(x.dtype)
    rows = gradient * (target != ignored).to(x.dtype)
    return rows.unsqueeze(1) * ((x - lse).exp() - chosen)


def _among_all(scores: Any, target: Any, weight: Any, offset: int) -> tuple[Any, Any]:
    dim = min(1, scores.dim() - 1)
    count = max(int(target.max()) + 1, offset + scores.shape[dim])
    shape = [*scores.shape[:dim], count, *scores.shape[dim + 1 :]]
    whole, weights = scores.new_zeros(shape), scores.new_zeros(count)
    whole.narrow(dim, offset, scores.shape[dim]).copy_(scores)
    weights[offset : offset + scores.shape[dim]] = 1 if weight is None else weight
    return whole, weights


def lstm(*call: Any) -> tuple[Any, ...]:
    """`weft.lstm` by `torch.lstm`; zeros are saved for the backward, which needs nothing."""
    *operands, reverse, train = call
    x, hidden = operands[0], operands[2].shape[1]
    saved = torch.zeros(x.shape[1], 5 * x.shape[0] * hidden * x.element_size() * train)
    return (*_layer(_with_biases(operands), reverse), saved.to(torch.uint8))


def lstm_backward(*call: Any) -> tuple[Any, ...]:
    """`weft.lstm_backward` by autograd."""
    gradients, operands, reverse = call[:3], call[3:10], call[-1]
    with torch.enable_grad():
        leaves = [one.detach().requires_grad_() for one in _with_biases(operands)]
        pairs = zip(_layer(leaves, reverse), gradients, strict=True)
        known = [(result, gradient) for result, gradient in pairs if gradient is not None]
        made, given = zip(*known, strict=True)
        found: tuple[Any, ...] = torch.autograd.grad(made, leaves, given)
    return found


def _with_biases(operands: Any) -> list[Any]:
    """The operands with zeros for biases that are None."""
    none = operands[2].new_zeros(operands[2].shape[0])
    return [none.clone() if one is None else one for one in operands]


def _layer(operands: list[Any], reverse: bool) -> tuple[Any, Any, Any]:
    x, *weights, state, cell = operands
    x = x.flip(0) if reverse else x
    first = (state[None], cell[None])
    out, last, last_cell = torch.lstm(x, first, weights, True, 1, 0.0, True, False, False)
    return out.flip(0) if reverse else out, last[0], last_cell[0]


def _uniform(size: Any, offset: Any, length: Any, salt: int, **options: Any) -> torch.Tensor:
    """The block of a whole tensor that depends on `size` and `salt` only: all that localizing may rely on."""
    whole = torch.rand(size, generator=torch.Generator().manual_seed(salt), dtype=options["dtype"])
    return whole[tuple(slice(o, o + n) for o, n in zip(offset, length, strict=True))]


def _embedding_shard(
    weight: Any, indices: Any, offset: int, table_rows: int | None = None
) -> torch.Tensor:
    inside = (indices >= offset) & (indices < offset + weight.shape[0])
    rows = weight[torch.where(inside, indices - offset, 0)]
    return torch.where(inside.unsqueeze(-1), rows, 0)


def _embedding_gradient_shard(
    gradient: Any, indices: Any, rows: int, offset: int, padding_idx: int, scale: bool
) -> Any:
    """The rows from `offset` of the whole gradient, taken from a whole table that is large enough."""
    size = max(int(indices.max()) + 1, offset + rows)
    whole = torch.ops.aten.embedding_dense_backward.default(
        gradient, indices, size, padding_idx, scale
    )
    return whole[offset : offset + rows]


MEANINGS: dict[str, Any] = {
    "weft.hint": lambda x, *rest: x,
    "weft.blank": blank,
    "weft.slice": slice_,
    "weft.checked": lambda x, info, name, matrix: x,
    "weft.required": lambda x, condition, text: x,
    "weft.lstsq": lstsq,
    "weft.ctc_loss": ctc_loss,
    "weft.ctc_loss_backward": ctc_loss_backward,
    "weft.uniform": _uniform,
    "weft.embedding_shard": _embedding_shard,
    "weft.embedding_dense_backward_shard": _embedding_gradient_shard,
    "weft.nll_loss_shard": nll_shard,
    "weft.nll_loss_backward_shard": nll_gradient_shard,
    "weft.class_scores": torch.matmul,
    "weft.sum_exp": lambda x, top, dim: (x - top).exp().sum(dim, keepdim=True),
    "weft.class_loss": class_loss,
    "weft.class_loss_backward": class_loss_gradient,
    "weft.attention_rows": attention_rows,
    "weft.attention_rows_backward": attention_rows_backward,
    "weft.lstm": lstm,
    "weft.lstm_backward": lstm_backward,
    "weft.square_sum": lambda x, dtype: (x * x).sum().to(dtype),
    "weft.nonfinite": lambda x: x.isfinite().logical_not().any().float(),
    "weft.scale": lambda x, factor: x * factor,
    "weft.cast_parts": lambda x, dtype: x.to(dtype),
    "weft.cast_whole": lambda x, dtype: x.to(dtype),
    **CHECKS,
    **CONVOLUTION_OPS,
    **TIME_OPS,
    **NORM_OPS,
    "weft.next_scale": next_scale,
    "weft.offload": lambda x: x,
    "weft.load": lambda host, device, awaited=None: host,
    "weft.after": lambda x, awaited: x,
    "weft.take": lambda x, *rest: x,
    "weft.clip_factor": lambda square, norm: torch.clamp(norm / (square.sqrt() + 1e-6), max=1.0),
}
