"""Operands on several placements of one model, as its stages have them, come to one of them."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from weft.layout import Layout, broadcast_layout
from weft.tensor.boxing import box
from weft.tensor.mesh import Mesh


def met(
    kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an op with all global tensors on one placement, where parts of one model lie on several.

    That is the placement of what the op writes, else of a parameter or buffer of a compiled model,
    which stay where they are, else of the first operand. Others are left for who names the error.
    """
    if op._schema.name.partition("::")[2].startswith(("_foreach_", "_fused_")):
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
