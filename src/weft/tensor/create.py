"""Functions that make global tensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, final

import torch
from torch import Tensor

from weft.capture.ops.random import normal, unit
from weft.errors import LayoutError, UserError, wrong
from weft.layout import SBP, Broadcast, Layout, Placement, Split
from weft.runtime.world.distributed import current_world
from weft.tensor.boxing import box, cut, from_first, in_layout
from weft.tensor.dispatch.special_ops import Drawing
from weft.tensor.divergence import note_made, note_plain
from weft.tensor.global_tensor import GlobalTensor
from weft.tensor.spec import (
    Mesh,
    Spec,
    check_gradient,
    checked_dtype,
    checked_number,
    checked_placement,
    checked_size,
    contiguous,
    layout_for,
    mesh_of,
    refused_call,
    sizes_of,
    without_partials,
)

SBPs = SBP | Sequence[SBP]


def tensor(
    data: Any,
    *,
    placement: Placement,
    sbp: SBPs,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """A global tensor with a whole value: a tensor or nested lists.

    Every process calls it with data of the same shape; the values of the placement's first rank
    count.

    Raises:
        LayoutError: when the layout does not fit the data or the world.
    """
    if isinstance(data, GlobalTensor):
        raise UserError("weft.tensor takes plain data, got a global tensor; use x.to_global(…)")
    checked_dtype(dtype, "weft.tensor")
    with refused_call("weft.tensor takes a tensor or nested lists of numbers", data):
        whole = torch.as_tensor(data, dtype=dtype).detach().resolve_conj().resolve_neg()
    if whole.is_meta or whole.layout != torch.strided:
        raise wrong("weft.tensor: data", "values that are dense in memory", data)
    check_gradient(requires_grad, whole.dtype, "weft.tensor")
    layout = layout_for(placement, sbp, whole.shape, "weft.tensor")
    mesh = mesh_of(placement)
    spec, parts = cut(from_first(whole, mesh), layout, mesh)
    return _made("weft.tensor", spec, parts, requires_grad)


def full(
    size: Sequence[int],
    value: float,
    *,
    placement: Placement,
    sbp: SBPs,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """A global tensor of whole shape `size` filled with one value."""
    size, number = checked_size(size, "weft.full"), checked_number(value, "weft.full: value=")
    of = checked_dtype(dtype, "weft.full") or torch.full((), number).dtype
    check_gradient(requires_grad, of, "weft.full")
    layout = layout_for(placement, sbp, size, "weft.full")
    mesh = mesh_of(placement)
    spec = contiguous(mesh, without_partials(layout), size, of)
    with refused_call("weft.full", size):
        parts = tuple(
            torch.full(shape, number, dtype=of, device=device) for shape, device in _local(spec)
        )
    return _made("weft.full", *in_layout(spec, parts, layout), requires_grad, number)


def zeros(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> GlobalTensor:
    """A global tensor of zeros: `weft.zeros(4, 8, placement=, sbp=)`."""
    return full(sizes_of(size), 0, dtype=_or_default(dtype, "weft.zeros"), **options)


def ones(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> GlobalTensor:
    """A global tensor of ones: `weft.ones(4, 8, placement=, sbp=)`."""
    return full(sizes_of(size), 1, dtype=_or_default(dtype, "weft.ones"), **options)


def empty(
    *size: Any,
    placement: Placement,
    sbp: SBPs,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """A global tensor whose values are not set."""
    shape, of = checked_size(sizes_of(size), "weft.empty"), _or_default(dtype, "weft.empty")
    check_gradient(requires_grad, of, "weft.empty")
    layout = layout_for(placement, sbp, shape, "weft.empty")
    spec = contiguous(mesh_of(placement), layout, shape, of)
    with refused_call("weft.empty", shape):
        parts = tuple(torch.empty(own, dtype=of, device=device) for own, device in _local(spec))
    return _made("weft.empty", spec, parts, requires_grad)


def arange(
    *bounds: Any,
    placement: Placement,
    sbp: SBPs,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    """`torch.arange(*bounds)` as a global tensor."""
    checked_dtype(dtype, "weft.arange")
    with refused_call("weft.arange takes the bounds and the step of torch.arange", bounds):
        # On no device at first: what is not a number of elements is refused before memory is taken.
        checked_size(tuple(torch.arange(*bounds, dtype=dtype, device="meta").shape), "weft.arange")
        whole = torch.arange(*bounds, dtype=dtype)
    check_gradient(requires_grad, whole.dtype, "weft.arange")
    layout = layout_for(placement, sbp, whole.shape, "weft.arange")
    spec, parts = cut(whole, layout, mesh_of(placement))
    return _made("weft.arange", spec, parts, requires_grad, *bounds)


def rand(*size: Any, **options: Any) -> GlobalTensor:
    """Uniform numbers in [0, 1), the same in every layout: `weft.rand(4, 8, placement=, sbp=)`."""
    return _drawn(unit, checked_size(sizes_of(size), "weft.rand"), **options)


def randn(*size: Any, **options: Any) -> GlobalTensor:
    """Normal numbers, the same in every layout: `weft.randn(4, 8, placement=, sbp=)`."""
    return _drawn(normal, checked_size(sizes_of(size), "weft.randn"), **options)


def from_local(
    shard: Tensor | Mapping[int, Tensor],
    *,
    placement: Placement,
    sbp: SBPs,
    shape: Sequence[int] | None = None,
) -> GlobalTensor:
    """A global tensor from each rank's local part; differentiable, and sharing memory.

    Along an axis where it is Broadcast, the parts of the ranks are compared when they communicate next.

    Args:
        shard: this rank's part; in a local world {rank: part}.
        placement: the ranks of the tensor.
        sbp: how the parts make up the whole; one SBP stands for every axis.
        shape: whole shape; by default every split dimension is divided evenly, or, if this
            process holds all parts, is the sum of their lengths.

    Raises:
        LayoutError: when the parts do not make up such a tensor.
        UserError: when this process has several ranks and `shard` is not a part for each.
    """
    made = of_parts(shard, placement, sbp, shape)
    spec = made.spec
    note_made(spec.mesh, "weft.from_local", str(spec))
    alike = [axis for axis, sbp in enumerate(spec.layout.sbp) if isinstance(sbp, Broadcast)]
    for part in made.locals:
        if part.device.type == "cpu":
            note_plain(spec.mesh, part, f"as {spec.layout}, ", alike)
    return made


def of_parts(
    shard: Tensor | Mapping[int, Tensor],
    placement: Placement,
    sbp: SBPs,
    shape: Sequence[int] | None,
) -> GlobalTensor:
    """Like `from_local`, without a comparison between ranks."""
    mesh = mesh_of(checked_placement(placement, "from_local"))
    parts = _parts(shard, mesh)
    given = None if shape is None else checked_size(shape, "from_local: shape=")
    first = parts[0] if parts else torch.empty(given or ())
    if given is not None and len(given) != first.dim():
        dims = f"{first.dim()} dimensions, as the parts have"
        raise wrong("from_local: shape=", dims, list(given), LayoutError)
    layout = layout_for(placement, sbp, first.shape, "from_local")
    whole = _whole_shape(parts, layout, mesh) if given is None else given
    for rank, part in zip(mesh.ranks, parts, strict=True):
        expected = layout.local_shape(whole, rank)
        if tuple(part.shape) != expected or part.dtype != first.dtype:
            raise LayoutError(
                f"from_local: as {layout}, rank {rank} holds {first.dtype} {list(expected)} of {list(whole)}, got "
                f"{part.dtype} {list(part.shape)}; shape= gives the whole shape where it does not divide evenly"
            )
    spec = contiguous(mesh, layout, whole, first.dtype)
    made: GlobalTensor = _FromLocal.apply(spec, *parts)  # type: ignore[no-untyped-call]
    return made


@final
class _FromLocal(torch.autograd.Function):
    """Parts to a global tensor; every part of a sum gets the whole gradient."""

    @staticmethod
    def forward(ctx: Any, spec: Spec, *parts: Tensor) -> GlobalTensor:
        ctx.spec = spec
        plain = (part.resolve_conj().resolve_neg() for part in parts)
        return GlobalTensor(spec, tuple(part.view_as(part) for part in plain))

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        spec = ctx.spec
        target = without_partials(spec.layout)
        _, parts = box(gradients[0].spec, gradients[0].locals, target, spec.mesh)
        return None, *parts


def _drawn(
    draw: Any,
    size: tuple[int, ...],
    *,
    placement: Placement,
    sbp: SBPs,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> GlobalTensor:
    of = _or_default(dtype, "weft.rand")
    if not (of.is_floating_point or of.is_complex):
        raise wrong("weft.rand: dtype=", "a floating-point or complex dtype", of)
    check_gradient(requires_grad, of, "weft.rand")
    layout = layout_for(placement, sbp, size, "weft.rand")
    mesh = mesh_of(placement)
    with (
        refused_call("weft.rand", size),
        torch.no_grad(),
        Drawing(GlobalTensor, mesh, layout, size),
    ):
        drawn = draw(size, of, mesh.device)
    return _made("weft.rand", *in_layout(drawn.spec, drawn.locals, layout), requires_grad)


def _made(
    what: str, spec: Spec, parts: tuple[Tensor, ...], requires_grad: bool, *values: object
) -> GlobalTensor:
    """The global tensor of some parts; that all ranks make it alike, of the same `values`, is compared later."""
    note_made(spec.mesh, what, str(spec), *values)
    return GlobalTensor(spec, parts).requires_grad_(requires_grad)  # type: ignore[return-value]


def _or_default(dtype: object, what: str) -> torch.dtype:
    return checked_dtype(dtype, what) or torch.get_default_dtype()


def _local(spec: Spec) -> list[tuple[tuple[int, ...], torch.device]]:
    mesh = spec.mesh
    return [
        (spec.layout.local_shape(spec.shape, rank), mesh.device_of(rank)) for rank in mesh.ranks
    ]


def _parts(shard: Tensor | Mapping[int, Tensor], mesh: Mesh) -> tuple[Tensor, ...]:
    if isinstance(shard, Tensor):
        ranks = current_world(mesh.placement.device_type).ranks
        if len(ranks) > 1:
            raise UserError(
                f"this process has the ranks {list(ranks)}: from_local takes {{rank: part}} here, got one tensor"
            )
        return (shard,) * len(mesh.ranks)
    if not isinstance(shard, Mapping) or not all(isinstance(x, Tensor) for x in shard.values()):
        raise wrong("from_local: shard", "a tensor, or {rank: part}", shard)
    missing = [rank for rank in mesh.ranks if rank not in shard]
    if missing:
        raise UserError(
            f"from_local has no part for ranks {missing}, only for {list(shard)}; give {{rank: part}} for each of "
            f"{list(mesh.ranks)}"
        )
    return tuple(shard[rank] for rank in mesh.ranks)


def _whole_shape(parts: Sequence[Tensor], layout: Layout, mesh: Mesh) -> tuple[int, ...]:
    if not parts:
        raise UserError(
            "from_local: a process outside of the placement must give shape=, the shape of the whole tensor"
        )
    whole = list(parts[0].shape)
    at = dict(zip(mesh.ranks, parts, strict=True))
    for axis, (sbp, size) in enumerate(zip(layout.sbp, layout.placement.shape, strict=True)):
        if not isinstance(sbp, Split):
            continue
        if mesh.in_process and layout.sbp.count(sbp) == 1:
            group = layout.placement.group(layout.placement.ranks[0], axis)
            whole[sbp.dim] = sum(at[rank].shape[sbp.dim] for rank in group)
        else:
            whole[sbp.dim] *= size
    return tuple(whole)
