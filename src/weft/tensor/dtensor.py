"""Conversion from and to DTensor, without copying."""

from __future__ import annotations

from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from weft.errors import LayoutError, UserError, wrong
from weft.layout import SBP, Broadcast, Layout, Partial, Placement, Split
from weft.tensor.dispatch.interleaved import check_order
from weft.tensor.divergence import note_made
from weft.tensor.global_tensor import GlobalTensor
from weft.tensor.spec import intern, mesh_of


@cache
def _dtensor() -> Any:
    """`torch.distributed.tensor`, which takes half a second to import: only whoever needs it pays."""
    return import_module("torch.distributed.tensor")


def from_dtensor(x: Any) -> GlobalTensor:
    """The DTensor as a global tensor on the same memory, without gradients.

    Raises:
        LayoutError: for placements that have no SBP, and shards that are not balanced.
    """
    if not isinstance(x, _dtensor().DTensor):
        raise wrong("weft.from_dtensor: x", "a DTensor", x)
    grid = x.device_mesh.mesh
    placement = Placement(
        x.device_mesh.device_type, tuple(grid.shape), tuple(grid.flatten().tolist())
    )
    layout = Layout(placement, tuple(_sbp(one) for one in x.placements))
    mesh = mesh_of(placement)
    local = x.to_local().detach()
    for rank in mesh.ranks:
        _check_balanced(tuple(x.shape), layout, rank, tuple(local.shape))
    spec = intern(mesh, layout, x.shape, x.stride(), x.dtype)
    note_made(mesh, "weft.from_dtensor", str(spec))
    return GlobalTensor(spec, (local,) * len(mesh.ranks))


def to_dtensor(x: GlobalTensor, device_mesh: DeviceMesh | None = None) -> Any:
    """The same tensor as a DTensor, on the same memory, without gradients.

    Args:
        x: a global tensor; this process has one rank of its placement.
        device_mesh: with the ranks of the placement; by default a new one, which all processes of
            the job must make together.

    Raises:
        UserError: in a local world of several ranks, or when the mesh has other ranks; for a tensor that is stored
            in shares.
        LayoutError: for what DTensor would cut otherwise.
    """
    if not isinstance(x, GlobalTensor):
        raise wrong("weft.to_dtensor: x", "a global tensor", x)
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise wrong("weft.to_dtensor: device_mesh=", "a DeviceMesh", device_mesh)
    placement, spec = x.placement, x.spec
    check_order(x, "to_dtensor")
    if len(spec.mesh.ranks) != 1:
        raise UserError(
            f"to_dtensor: this process has the ranks {list(spec.mesh.ranks)}; expected one: start a process for each "
            "rank with weft run -n"
        )
    grid = torch.tensor(placement.ranks).view(placement.shape)
    mesh = device_mesh or DeviceMesh(placement.device_type, grid)
    if not torch.equal(mesh.mesh.cpu(), grid):
        raise UserError(
            f"to_dtensor: the mesh {mesh} has other ranks than {placement}; give a DeviceMesh of these, or none"
        )
    for rank in placement.ranks:
        _check_chunks(spec.shape, spec.layout, rank)
    return _dtensor().DTensor.from_local(
        x.locals[0],
        mesh,
        [_placement(sbp) for sbp in spec.layout.sbp],
        run_check=False,
        shape=torch.Size(spec.shape),
        stride=spec.strides,
    )


def _sbp(placement: Any) -> SBP:
    known = _dtensor()
    if type(placement) is known.Replicate:
        return Broadcast()
    if type(placement) is known.Shard:  # a strided shard is another class
        return Split(placement.dim)
    if type(placement) is known.Partial and placement.reduce_op in _SHARED:
        return Partial(placement.reduce_op)
    raise LayoutError(
        f"from_dtensor: the placement {placement} has no SBP; redistribute to Shard, Replicate or Partial of "
        f"{', '.join(_SHARED)}"
    )


def _placement(sbp: SBP) -> Any:
    known = _dtensor()
    match sbp:
        case Broadcast():
            return known.Replicate()
        case Split(dim):
            return known.Shard(dim)
        case Partial(reduction) if reduction in _SHARED:
            return known.Partial(reduction)
    raise LayoutError(f"to_dtensor: DTensor has no placement for {sbp}; box the tensor first")


# Reductions that both know.
_SHARED = ("sum", "max", "min")


def _check_balanced(
    shape: tuple[int, ...], layout: Layout, rank: int, found: tuple[int, ...]
) -> None:
    expected = layout.local_shape(shape, rank)
    if found != expected:
        raise LayoutError(
            f"from_dtensor: rank {rank} holds {list(found)} of {list(shape)} as {layout}; balanced shards hold "
            f"{list(expected)}. Redistribute to Replicate, or split a dimension that divides evenly"
        )


def _check_chunks(shape: tuple[int, ...], layout: Layout, rank: int) -> None:
    """DTensor cuts as `torch.chunk` does, which differs where a dimension does not divide evenly."""
    chunks = list(shape)
    place = layout.placement.coordinates[rank]
    for sbp, parts, index in zip(layout.sbp, layout.placement.shape, place, strict=True):
        if isinstance(sbp, Split):
            size = chunks[sbp.dim]
            most = -(-size // parts)
            chunks[sbp.dim] = max(0, min(most, size - most * index))
    if tuple(chunks) != layout.local_shape(shape, rank):
        raise LayoutError(
            f"to_dtensor: DTensor would give rank {rank} {chunks} of {list(shape)}, not "
            f"{list(layout.local_shape(shape, rank))}; box to weft.broadcast, or split a dimension that divides evenly"
        )
