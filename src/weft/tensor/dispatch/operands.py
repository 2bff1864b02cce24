"""The conditions on an op's operands: on one placement; plain tensors among them are the same on all ranks.

Those on several placements of one model, as its stages have them, come to one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.capture.optimizers import fused
from weft.errors import LayoutError
from weft.layout import Layout, broadcast_layout
from weft.tensor.boxing import box
from weft.tensor.divergence import note_plain, user_line
from weft.tensor.mesh import Mesh
from weft.tensor.spec import intern


def common_mesh(kind: Any, op: Any, tensors: Sequence[Any]) -> Mesh:
    """The mesh on which all global operands lie; that of the largest family, where they are of several.

    Raises:
        LayoutError: naming op, line and what each operand is.
    """
    meshes: dict[Mesh, None] = dict.fromkeys(
        tensor.spec.mesh for tensor in tensors if isinstance(tensor, kind)
    )
    if len({mesh.placement for mesh in meshes}) > 1:
        raise LayoutError(
            f"{user_line()}: {op} has operands on different placements: {_listed(kind, tensors)}. Bring them to one: "
            "x.to_global(placement=…, sbp=…)"
        )
    first = next(iter(meshes))
    if not all(mesh.same_job(first) for mesh in meshes):
        raise LayoutError(
            f"{user_line()}: {op} has operands of different worlds; tensors of a local world cannot meet those "
            "of several processes: make all of them inside of weft.local_world, or all outside of it"
        )
    return max(meshes, key=lambda mesh: len(mesh.family))


def lifted(kind: Any, op: Any, mesh: Mesh, value: Any) -> Any:
    """An argument with its plain tensors as global ones, Broadcast.

    Scalars stay, as they are promoted otherwise; so do sparse tensors, which are never global.

    That they are the same on all ranks is checked with the next communication.

    Raises:
        LayoutError: for a plain tensor that wants a gradient.
    """
    if isinstance(value, list | tuple):
        parts = [lifted(kind, op, mesh, part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if not isinstance(value, Tensor) or isinstance(value, kind):
        return value
    note_plain(mesh, value)
    if not value.dim():
        return value
    if value.requires_grad and torch.is_grad_enabled():
        raise LayoutError(
            f"{user_line()}: {op} mixes global tensors and a plain {list(value.shape)} that wants a gradient. Make it "
            "global: weft.tensor(x, placement=…, sbp=…) when each process has the whole, weft.from_local(x, …) when it "
            "has its own part, weft.distribute(module, …) for parameters"
        )
    if value.layout != torch.strided:
        return value
    return everywhere(kind, mesh, value)


def everywhere(kind: Any, mesh: Mesh, tensor: Tensor) -> Any:
    """A plain tensor that is the same on all ranks, as a global one that shares its memory."""
    whole = tensor.detach().resolve_conj().resolve_neg()
    layout = broadcast_layout(mesh.placement)
    spec = intern(mesh, layout, whole.shape, whole.stride(), whole.dtype)
    return kind(spec, tuple(whole.to(mesh.device_of(rank)) for rank in mesh.ranks))


def _listed(kind: Any, tensors: Sequence[Any]) -> str:
    return ", ".join(
        str(tensor.spec)
        if isinstance(tensor, kind)
        else f"a plain {list(tensor.shape)} on {tensor.device}"
        for tensor in tensors
    )


def met(
    kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op with all global tensors on one placement, where parts of one model lie on several.

    That is the placement of what the op writes, else of a parameter or buffer of a compiled model,
    which stay where they are, else of the first operand. Others are left for who names the error.
    """
    if fused.updates(op) or op._schema.name.startswith("aten::_foreach_"):
        return args, kwargs  # they take their lists apart
    every = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, kind)]
    meshes = [x.spec.mesh for x in every]
    placements = {mesh.placement for mesh in meshes}
    if len(placements) < 2 or not all(
        placements <= mesh.family and mesh.same_job(meshes[0]) for mesh in meshes
    ):
        return args, kwargs
    held = [x for x in every if x.hold is not None and not op._schema.is_mutable]
    mesh = (held or every)[0].spec.mesh

    def moved(value: Any) -> Any:
        return to_mesh(kind, value, mesh, str(op)) if isinstance(value, kind) else value

    return pytree.tree_map(moved, args), pytree.tree_map(moved, kwargs)


def to_mesh(kind: Any, tensor: Any, mesh: Mesh, why: str) -> Any:
    """A global tensor on another placement, laid as it was where the two are alike."""
    if tensor.placement == mesh.placement:
        return tensor
    here, there = tensor.spec.layout, mesh.placement
    alike = here.placement.shape == there.shape
    target = Layout(there, here.sbp) if alike else broadcast_layout(there)
    return kind(*box(tensor.spec, tensor.locals, target, mesh, implicit=why))
