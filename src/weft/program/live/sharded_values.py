"""Conversion of a live model's values to the layouts of plans, and back to whole tensors.

`swap` gives a tensor object another content, so that all who hold the object see it. Private API:
`torch._C._swap_tensor_impl`, `Tensor._use_count`. `torch.utils.swap_tensors` does the same, but refuses tensors that
are referred to weakly, as recurrent layers refer to their weights; these references are to the object, which stays.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import UserError
from weft.layout import Broadcast, Layout, Placement, Shares
from weft.runtime.memory.state import Variables, local_part
from weft.tensor import GlobalTensor
from weft.tensor.boxing import assemble
from weft.tensor.dispatch.interleaved import in_order, in_shares, relaid, stored_in
from weft.tensor.spec import Mesh, contiguous


def by_placement(variables: Mapping[int, Variables], parameter: Tensor) -> list[Variables]:
    """The variables of this process's ranks, in the order of a parameter's placement."""
    if isinstance(parameter, GlobalTensor):
        return [variables[rank] for rank in parameter.spec.mesh.ranks if rank in variables]
    return list(variables.values())


def parts_of(tensor: GlobalTensor) -> dict[int, Tensor]:
    """The part of every rank of this process as it is stored, in shares or not."""
    return dict(zip(tensor.spec.mesh.ranks, tensor.locals, strict=True))


def of_rank(value: Any, rank: int) -> Any:
    """The part that a rank of this process has of a value: its part of a global tensor, all of anything else."""
    return parts_of(value)[rank] if isinstance(value, GlobalTensor) else value


def cut_value(
    value: Tensor, layout: Layout, mesh: Mesh, shares: Shares | None = None
) -> GlobalTensor:
    """A global tensor of a whole value; the part that is all of it shares memory where there is one only."""
    shape, value, parts = tuple(value.shape), in_shares(value.detach(), shares), []
    for rank in mesh.ranks:
        part = local_part(value, layout, rank)
        copied = part.shape != value.shape or len(mesh.ranks) > 1
        parts.append(part.to(mesh.device_of(rank), copy=copied).contiguous())
    return global_of(parts, layout, mesh, shape, value.dtype, shares)


def global_of(
    parts: Sequence[Tensor],
    layout: Layout,
    mesh: Mesh,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    shares: Shares | None = None,
) -> GlobalTensor:
    """A global tensor of the parts of this process's ranks, contiguous, as they are stored."""
    spec = contiguous(mesh, layout, shape, dtype)
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
    # A tensor in one process alone may be of an earlier local world, or of one stage of this job.
    if tensor.spec.mesh.in_process and not tensor.spec.mesh.same_job(mesh):
        return cut_value(whole_of(tensor), layout, mesh, shares)
    spec, parts = relaid(tensor.spec, tensor.locals, layout, mesh, tensor.shares, shares)
    moved: GlobalTensor = stored_in(GlobalTensor(spec, parts), shares)
    return moved


def whole_of(tensor: Any) -> Any:
    """A plain copy of a tensor, whole; what is no tensor itself. Collective."""
    if not isinstance(tensor, GlobalTensor):
        return tensor.detach().clone() if isinstance(tensor, Tensor) else tensor
    mesh = tensor.spec.mesh
    # A stage may be in one process alone, and still the others want its tensors.
    if not mesh.world.several:
        found = assemble(tensor.spec, parts_of(tensor)).detach()
        return in_order(found, tensor.shares).clone()
    size = mesh.world.size
    everywhere = Placement(mesh.placement.device_type, (size,), tuple(range(size)))
    detached: Any = tensor.detach()
    with torch.no_grad():
        return detached.to_global(placement=everywhere, sbp=Broadcast()).full()


def check_unused(tensor: Tensor, name: str) -> None:
    """Raise UserError, naming a tensor, when a graph of autograd needs its values, so that it cannot be swapped."""
    uses: int = tensor._use_count()  # type: ignore[attr-defined]
    # A graph that has run backward still ends in what adds the gradient up.
    if uses > (2 if tensor.requires_grad else 1):
        raise UserError(
            f"{name} cannot be moved to the program, as an autograd graph needs its values: let the losses and "
            "outputs of "
            "earlier calls of the model go (del loss), or run their backward, first. Or there is a view of it, such as "
            "a buffer tensor[:3]: give it memory of its own, tensor[:3].clone()"
        )


def swap(one: Tensor, other: Tensor) -> None:
    """Exchange class, attributes and data of two tensors; a graph of autograd that ends in `one` is of no use then."""
    if one._use_count() > 1:  # type: ignore[attr-defined]
        torch.autograd.graph.get_gradient_edge(one).node.register_prehook(_too_late)
    exchange(one, other)


def exchange(one: Tensor, other: Tensor) -> None:
    """Exchange the data of two tensors until the next exchange; autograd graphs keep what they have."""
    one.__class__, other.__class__ = other.__class__, one.__class__
    one.__dict__, other.__dict__ = other.__dict__, one.__dict__
    torch._C._swap_tensor_impl(one, other)


def _too_late(gradients: object) -> None:
    raise UserError(
        "backward() of a loss from before weft.compile took the model over; call the model again for a new loss"
    )
