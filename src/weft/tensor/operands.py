"""What an op's operands must be: on one placement; plain tensors among them are the same on all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from weft.errors import LayoutError
from weft.layout import broadcast_layout
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
            "of several processes"
        )
    return max(meshes, key=lambda mesh: len(mesh.family))


def lifted(kind: Any, op: Any, mesh: Mesh, value: Any) -> Any:
    """An argument with its plain tensors as global ones, Broadcast; scalars stay, as they are promoted otherwise.

    That they are the same on all ranks is checked with the next communication.

    Raises:
        LayoutError: for a plain tensor that wants a gradient, or is not strided.
    """
    if isinstance(value, list | tuple):
        parts = [lifted(kind, op, mesh, part) for part in value]
        return tuple(parts) if isinstance(value, tuple) else parts
    if not isinstance(value, Tensor) or isinstance(value, kind):
        return value
    note_plain(mesh, value)
    if not value.dim():
        return value
    if value.layout != torch.strided or (value.requires_grad and torch.is_grad_enabled()):
        why = "wants a gradient" if value.layout == torch.strided else "is sparse"
        raise LayoutError(
            f"{user_line()}: {op} mixes global tensors and a plain {list(value.shape)} that {why}. Make it global: "
            "weft.tensor(x, placement=…, sbp=…) when each process has the whole, weft.from_local(x, …) when it has its "
            "own part, weft.distribute(module, …) for parameters"
        )
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
