"""Values of a live model as plans want them: cut, laid, and whole again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from weft.layout import Broadcast, Layout, Placement, Shares
from weft.program.shards import local_part
from weft.runtime.state import Variables
from weft.tensor import GlobalTensor
from weft.tensor.mesh import Mesh
from weft.tensor.shares import in_order, in_shares, relaid, stored_in
from weft.tensor.spec import contiguous
from weft.tensor.whole import assemble


def by_placement(variables: Mapping[int, Variables], parameter: Tensor) -> list[Variables]:
    """The variables of this process's ranks, in the order of a parameter's placement."""
    if isinstance(parameter, GlobalTensor):
        return [variables[rank] for rank in parameter.spec.mesh.ranks if rank in variables]
    return list(variables.values())


def parts_of(tensor: GlobalTensor) -> dict[int, Tensor]:
    """The part of every rank of this process as it is stored, in shares or not."""
    return dict(zip(tensor.spec.mesh.ranks, tensor.locals, strict=True))


def of_rank(value: Any, rank: int) -> Any:
    """What a rank of this process has of a value: its part of a global tensor, all of anything else."""
    return parts_of(value)[rank] if isinstance(value, GlobalTensor) else value


def cut_value(
    value: Tensor, layout: Layout, mesh: Mesh, shares: Shares | None = None
) -> GlobalTensor:
    """A global tensor of a whole value; the part that is all of it shares memory where there is one only."""
    spec = contiguous(mesh, layout, tuple(value.shape), value.dtype)
    value, parts = in_shares(value.detach(), shares), []
    for rank in mesh.ranks:
        part = local_part(value, layout, rank)
        copied = part.shape != value.shape or len(mesh.ranks) > 1
        parts.append(part.to(mesh.device_of(rank), copy=copied).contiguous())
    made: GlobalTensor = stored_in(GlobalTensor(spec, tuple(parts)), shares)
    return made


def laid_as(
    tensor: GlobalTensor,
    layout: Layout,
    dtype: torch.dtype,
    shares: Shares | None = None,
    mesh: Mesh | None = None,
) -> GlobalTensor:
    """A global tensor in a layout of the current world, in shares, and in a dtype; itself when it is so."""
    mesh = mesh or tensor.spec.mesh.at(layout.placement)
    if tensor.dtype != dtype:
        tensor = tensor.detach().to(dtype)  # type: ignore[assignment]
    if tensor.spec.layout == layout and tensor.spec.mesh is mesh and tensor.shares == shares:
        return tensor
    if tensor.spec.mesh.in_process and not mesh.in_process:
        return cut_value(whole_of(tensor), layout, mesh, shares)
    spec, parts = relaid(tensor.spec, tensor.locals, layout, mesh, tensor.shares, shares)
    moved: GlobalTensor = stored_in(GlobalTensor(spec, parts), shares)
    return moved


def whole_of(tensor: GlobalTensor) -> Tensor:
    """A plain copy of a global tensor; collective."""
    mesh = tensor.spec.mesh
    size = mesh.world.size
    # A stage may lie in one process alone, and still the others want its tensors.
    if len(mesh.world.ranks) == size:
        found = assemble(tensor.spec, parts_of(tensor)).detach()
        return in_order(found, tensor.shares).clone()
    everywhere = Placement(mesh.placement.device_type, (size,), tuple(range(size)))
    detached: Any = tensor.detach()
    with torch.no_grad():
        whole: Tensor = detached.to_global(placement=everywhere, sbp=Broadcast()).full()
    return whole
