"""Checks of an op's operands: one placement, and no plain tensors but scalars."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.errors import LayoutError
from weft.tensor.divergence import user_line
from weft.tensor.mesh import Mesh


def common_mesh(kind: Any, op: Any, tensors: Sequence[Any]) -> Mesh:
    """The mesh on which all operands lie.

    Raises:
        LayoutError: naming op, line and what each operand is.
    """
    meshes = dict.fromkeys(tensor.spec.mesh for tensor in tensors if isinstance(tensor, kind))
    plain = [tensor for tensor in tensors if not isinstance(tensor, kind)]
    if any(tensor.dim() for tensor in plain):
        raise LayoutError(
            f"{user_line()}: {op} mixes global and plain tensors: {_listed(kind, tensors)}. Make the plain ones "
            "global: weft.tensor(x, placement=…, sbp=…) when each process has the whole, weft.from_local(x, …"
            ") when it has its own part; or take plain tensors with .full() or .to_local()"
        )
    if len({mesh.placement for mesh in meshes}) > 1:
        raise LayoutError(
            f"{user_line()}: {op} has operands on different placements: {_listed(kind, tensors)}. Bring them to one: "
            "x.to_global(placement=…, sbp=…)"
        )
    if len(meshes) > 1:
        raise LayoutError(
            f"{user_line()}: {op} has operands of different worlds; tensors of a local world cannot meet those "
            "of several processes"
        )
    mesh: Mesh = next(iter(meshes))
    return mesh


def _listed(kind: Any, tensors: Sequence[Any]) -> str:
    return ", ".join(
        str(tensor.spec)
        if isinstance(tensor, kind)
        else f"a plain {list(tensor.shape)} on {tensor.device}"
        for tensor in tensors
    )
