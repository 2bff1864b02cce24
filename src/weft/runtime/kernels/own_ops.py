"""`weft.expert_mm` and what belongs to it (`weft.ops.rules.own_ops`) on local tensors.

Rows come in any order. If those of an expert stand together, as in the buffers that `weft.routes`
fills, products read and write them in place; elsewhere each expert's are taken out, multiplied, and put
in their places. Experts without rows cost nothing, nor do rows without an expert, such as padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import ceil
from typing import Any, final

import torch
from torch import Tensor

from weft.errors import UserError
from weft.ops.rules.own_ops import rows_of_expert
from weft.runtime.channels.channel import COMBINE, SIGNED, reduce_in_order
from weft.runtime.kernels.dense_operands import SUMMED_PRODUCT, SumOfProducts
from weft.runtime.memory.state import from_host, to_host
from weft.runtime.recording import note_kind

# Up to so many runs of rows for each expert, products go run by run.
RUNS = 8


def segments(offs: Tensor, rows: int, first: int) -> Tensor:
    """`weft.segments`: the number of ends at or before each row, from row `first` on."""
    places = torch.arange(first, first + rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs, places, right=True)


def expert_mm(x: Tensor, w: Tensor, ids: Tensor, offset: int) -> Tensor:
    """`weft.expert_mm`: rows [s, k] or [b, r, k] times the matrices [e, k, n] of their experts."""
    if ids.dim() == 2:
        flat = expert_mm(x.flatten(0, 1), w, _numbered(ids, w.shape[0]), 0)
        return flat.view(*ids.shape, w.shape[-1])
    experts = w.shape[0]
    keys = _keys(ids, experts, offset)
    made = x.new_empty(x.shape[0], w.shape[-1])
    runs = _runs_of(keys, experts)
    if runs is not None:
        for expert, part in runs:
            if expert < experts:
                torch.mm(x[part], w[expert], out=made[part])
            else:
                made[part] = 0
        return made
    for expert, rows in _rows_of(keys, experts + 1):
        if expert < experts:
            for some in torch.split(rows, rows_of_expert(len(keys), experts)):
                made.index_copy_(0, some, x.index_select(0, some) @ w[expert])
        else:
            made.index_fill_(0, rows, 0)
    return made


def expert_gradient(x: Tensor, g: Tensor, ids: Tensor, experts: int, offset: int) -> Tensor:
    """`weft.expert_gradient`: `x[rows]ᵀ g[rows]` of each expert, [e, k, n]."""
    if ids.dim() == 2:
        ids = _numbered(ids, experts)
        return expert_gradient(x.flatten(0, 1), g.flatten(0, 1), ids, experts, 0)
    keys = _keys(ids, experts, offset)
    made = x.new_empty(experts, x.shape[-1], g.shape[-1])
    empty = set(range(experts))
    runs = _runs_of(keys, experts)
    if runs is not None:
        for expert, part in runs:
            if expert < experts:
                _add_product(made[expert], x[part], g[part], expert in empty)
                empty.discard(expert)
    else:
        for expert, rows in _rows_of(keys, experts):
            for some in torch.split(rows, rows_of_expert(len(keys), experts)):
                parts = (x.index_select(0, some), g.index_select(0, some))
                _add_product(made[expert], *parts, expert in empty)
                del parts  # before the next ones are made
                empty.discard(expert)
    for expert in empty:
        made[expert] = 0
    return made


def _add_product(made: Tensor, x: Tensor, g: Tensor, first: bool) -> None:
    if first:
        torch.mm(x.t(), g, out=made)
    else:
        made.addmm_(x.t(), g)


def _keys(ids: Tensor, experts: int, offset: int) -> Tensor:
    """The expert of each row, counted from the first of ours; `experts` for rows of others and of none."""
    local = ids - offset if offset else ids
    return local.masked_fill((local < 0) | (local >= experts), experts)


def _runs_of(keys: Tensor, experts: int) -> list[tuple[int, slice]] | None:
    """Rows with the same expert that stand together; None if they are too short to go one by one."""
    starts = (keys[1:] != keys[:-1]).nonzero().squeeze(1).add_(1)
    if starts.numel() + 1 > RUNS * experts:
        return None
    ends = [*starts.tolist(), keys.numel()]
    firsts = keys.index_select(0, starts).tolist()
    numbers = [*keys[:1].tolist(), *firsts]
    found = zip(numbers, [0, *ends[:-1]], ends, strict=False)
    return [(number, slice(start, end)) for number, start, end in found if end > start]


def _numbered(ids: Tensor, experts: int) -> Tensor:
    """Experts of all blocks [b, r], counted from the first block's, -1 for none: [b·r]."""
    each = experts // ids.shape[0]
    first = torch.arange(0, experts, each, device=ids.device).unsqueeze(1)
    return (ids + first).masked_fill_((ids < 0) | (ids >= each), -1).flatten()


def _rows_of(keys: Tensor, experts: int) -> Iterator[tuple[int, Tensor]]:
    order = keys.argsort(dim=0, stable=True)
    counts = torch.bincount(keys, minlength=experts).tolist()
    for expert, rows in enumerate(torch.split(order, counts)[:experts]):
        if rows.numel():
            yield expert, rows


def routes(ids: Tensor, experts: int, groups: int, blocks: int, capacity: int) -> Tensor:
    """`weft.routes`: the place of each row in its group's buffer [blocks · capacity], -1 for none.

    Raises:
        UserError: when a group has more rows for a block than `capacity`.
    """
    expert = _keys(ids, experts, 0).view(groups, -1)
    # By expert, not by block alone: a product then finds the rows of each together.
    order = expert.argsort(dim=1, stable=True)
    block = expert.div(experts // blocks, rounding_mode="floor")
    counts = block.new_zeros(groups, blocks + 1)
    counts.scatter_add_(1, block, torch.ones_like(block))
    _check(counts[:, :blocks], capacity, block.shape[1])
    # For the rows in order, the first of each block is the `start`th.
    start = counts.cumsum(1) - counts
    sorted_blocks = block.gather(1, order)
    place = torch.arange(block.shape[1], device=ids.device) - start.gather(1, sorted_blocks)
    place = (place + sorted_blocks * capacity).masked_fill_(sorted_blocks == blocks, -1)
    return torch.empty_like(place).scatter_(1, order, place).view(-1)


def _check(counts: Tensor, capacity: int, rows: int) -> None:
    largest = counts.max() if counts.numel() else None
    if largest is None or capacity >= rows:
        return
    if counts.device.type != "cpu":  # without waiting for the device
        torch._assert_async(largest <= capacity)
    elif int(largest) > capacity:
        even = rows / counts.shape[1]
        raise UserError(
            f"a rank has {int(largest)} rows for the experts of one rank, of its {rows}; the buffers hold {capacity}: "
            f"weft.expert_parallel(capacity={ceil(1000 * int(largest) / even) / 1000:g}) or more would do, or None, "
            "which holds all"
        )


def dispatch(
    x: Tensor,
    places: Tensor,
    groups: int,
    blocks: int,
    capacity: int,
    around: int,
    first: int,
    each: int,
) -> Tensor:
    """`weft.dispatch`: rows [s / each, …] at their places in [blocks, groups · capacity, …]."""
    made = x.new_full((blocks, groups * capacity, *x.shape[1:]), around)
    ours, target = _targets(places, groups, blocks, capacity, first)
    made.flatten(0, 1)[target] = x[ours if each == 1 else ours // each]
    return made


def combine(z: Tensor, places: Tensor, groups: int, capacity: int, first: int, each: int) -> Tensor:
    """`weft.combine`: sums of each `each` rows from their places in [blocks, groups · capacity, …]."""
    blocks, rest = z.shape[0], z.shape[2:]
    wide = each > 1 and z.dtype in (torch.bfloat16, torch.float16)
    made = z.new_zeros(places.shape[0] // each, *rest, dtype=torch.float32 if wide else z.dtype)
    ours, target = _targets(places, groups, blocks, capacity, first)
    z = z.flatten(0, 1)
    if each == 1:
        made[ours] = z[target]
        return made
    # One of each `each` at a time: no row is written twice, so the order of the sum is fixed.
    for i in range(each):
        turn = (ours % each == i).nonzero().squeeze(1)
        rows = ours[turn] // each
        made[rows] += z[target[turn]]
    return made.to(z.dtype)


def _targets(
    places: Tensor, groups: int, blocks: int, capacity: int, first: int
) -> tuple[Tensor, Tensor]:
    """The rows that go to the blocks from `first`, and where in [blocks · groups · capacity]."""
    local = places - first * capacity
    ours = ((places >= 0) & (local >= 0) & (local < blocks * capacity)).nonzero().squeeze(1)
    target = local[ours]
    # Rows in blocks of one group go to blocks of all groups.
    target += target.div(max(capacity, 1), rounding_mode="floor").mul_(capacity * (groups - 1))
    target += ours.div(max(places.shape[0] // groups, 1), rounding_mode="floor").mul_(capacity)
    return ours, target


EXPERT_OPS: dict[str, Callable[..., Any]] = {
    "weft.segments": segments,
    "weft.expert_mm": expert_mm,
    "weft.expert_gradient": expert_gradient,
    "weft.routes": routes,
    "weft.dispatch": dispatch,
    "weft.combine": combine,
}


# Kernels of the ops that passes put into a graph (`weft.ops.rules.own_ops`, `weft.ops.rules.own_ops`).
#
# Ops of `OVER_STEP` make one value of all micro-batches of a step, and keep it between acts.


_HALF = (torch.float16, torch.bfloat16)


def square_sum(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`weft.square_sum`: the sum of the squares of all elements in `dtype`, shape `[]`."""
    # Torch's norm makes no tensor of squares, and sums halves in float32.
    exact = torch.float32 if x.dtype in _HALF else None
    norm: Tensor = torch.linalg.vector_norm(x, dtype=exact)
    return norm.square().to(dtype)


def nonfinite(x: Tensor) -> Tensor:
    """`weft.nonfinite`: 1.0 when an element of `x` is infinite or not a number, else 0.0; float32."""
    if not x.numel():
        return x.new_zeros((), dtype=torch.float32)
    # Least and largest number tell, and take no tensor of the size of `x`.
    return (~torch.isfinite(torch.stack(torch.aminmax(x))).all()).float()


def scale(x: Tensor, factor: Tensor) -> Tensor:
    """`weft.scale`: `x` times the number `factor`, in the dtype of `x`."""
    return x * factor.to(x.dtype)


def cast(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`weft.cast_parts`, `weft.cast_whole`: `x` in `dtype`."""
    return x.to(dtype)


def clip_factor(square: Tensor, max_norm: float) -> Tensor:
    """`weft.clip_factor`: what gradients with `square` as sum of squares are multiplied by.

    The formula of `torch.nn.utils.clip_grad_norm_`.
    """
    return torch.clamp(max_norm / (square.sqrt() + 1e-6), max=1.0)


def next_scale(scale: Tensor, tracker: Tensor, overflow: Tensor) -> tuple[Tensor, Tensor]:
    """`weft.next_scale`: the loss scale after a step, and for how many steps it has stood.

    Halved on overflow, doubled after 2000 steps without: the numbers of `torch.amp.GradScaler`.
    """
    scale, tracker = scale.clone(), tracker.clone()
    torch._amp_update_scale_(scale, tracker, overflow, 2.0, 0.5, 2000)
    return scale, tracker


def offload(x: Tensor) -> Tensor:
    """`weft.offload`: a copy in host memory; for a GPU in pinned memory, on its way while others compute."""
    host = to_host(x)
    note_kind([host], "host")
    return host


def load(host: Tensor, device: torch.device, awaited: Tensor | None = None) -> Tensor:
    """`weft.load`: a copy of what `offload` made, on the device, once `awaited` is there."""
    return from_host(host, device)


def after(x: Tensor, awaited: Tensor) -> Tensor:
    """`weft.after`: `x`; whoever runs it has waited for `awaited`."""
    return x


PASS_OPS: dict[str, Callable[..., Any]] = {
    "weft.square_sum": square_sum,
    "weft.nonfinite": nonfinite,
    "weft.scale": scale,
    "weft.cast_parts": cast,
    "weft.cast_whole": cast,
    "weft.clip_factor": clip_factor,
    "weft.next_scale": next_scale,
    "weft.offload": offload,
    "weft.load": load,
    "weft.after": after,
}


def alone(x: Tensor, argument: Any) -> Tensor:
    """`weft.accumulate` and `weft.pack` of a single micro-batch, and `weft.use`: `x` itself."""
    return x


TIME_OPS: dict[str, Callable[..., Any]] = {
    "weft.accumulate": alone,
    "weft.pack": alone,
    "weft.use": alone,
}


@final
class Accumulate:
    """`weft.accumulate(x, reduction)`: the reduction of `x` over the micro-batches, in place.

    Args:
        owned: true if nobody else reads or keeps the memory of `x`, so that the first one may take the others in.
    """

    def __init__(self, micro_batches: int, owned: bool) -> None:
        self._last = micro_batches - 1
        self._owned = owned
        # The reduction so far; None between steps.
        self._total: Tensor | None = None

    def __call__(self, micro: int, x: Tensor, /, reduction: str) -> Tensor:
        total = self._total
        if total is None:
            total = x if self._owned else x.clone()
        elif x.dtype in SIGNED:
            total = reduce_in_order((total, x), reduction)
        else:
            COMBINE[reduction](total, x, out=total)
        self._total = None if micro == self._last else total
        return total


@final
class Pack:
    """`weft.pack(x, dim)`: the values of the micro-batches, all of one size, joined along `dim`."""

    def __init__(self, micro_batches: int, owned: bool = False) -> None:
        self._micro_batches = micro_batches
        # The values packed so far; None between steps.
        self._whole: Tensor | None = None

    def __call__(self, micro: int, x: Tensor, /, dim: int) -> Tensor:
        size = x.shape[dim]
        whole = self._whole
        if whole is None:
            shape = list(x.shape)
            shape[dim] *= self._micro_batches
            whole = x.new_empty(shape)
        whole.narrow(dim, micro * size, size).copy_(x)
        self._whole = None if micro + 1 == self._micro_batches else whole
        return whole


# Of (micro-batches, owned): something that takes the values of one step's micro-batches in order, as
# `(micro, x, argument)`; what it returns after the last one is the result.
OVER_STEP_OPS: dict[str, Callable[[int, bool], Callable[..., Tensor]]] = {
    "weft.accumulate": Accumulate,
    "weft.pack": Pack,
    SUMMED_PRODUCT: SumOfProducts,
}
