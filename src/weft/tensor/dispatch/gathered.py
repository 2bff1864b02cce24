"""Ops that run whole at once: operands are gathered, every rank computes all, the result is Broadcast.

So run ops whose results depend on values in more than their elements (shapes, numbers for Python), those that
have no rule, and those of sparse tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.errors import UserError
from weft.layout import Placement, broadcast_layout
from weft.tensor.boxing import box
from weft.tensor.dispatch.arguments import Reader
from weft.tensor.dispatch.operands import common_mesh, everywhere, lifted
from weft.tensor.divergence import user_line
from weft.tensor.mesh import Mesh
from weft.tensor.spec import intern


def gathered(
    kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], function: Any = None
) -> Any:
    """The results of `op`, or of a function in its place, on whole copies of its operands, which it may write."""
    run, reader = function or op, Reader(kind)
    reader.key((*args, *kwargs.values()))
    home = common_mesh(kind, op, reader.tensors)
    mesh = of_all(home)
    if not mesh.ranks:
        raise UserError(
            f"{user_line()}: {op}: this process has no rank of {mesh.placement}; call it on ranks of the placement "
            "only, or bring the operands to one that has this rank: x.to_global(placement=…, sbp=…)"
        )
    whole = _whole(kind, op, mesh, lifted(kind, op, mesh, args))
    named = _whole(kind, op, mesh, [lifted(kind, op, mesh, value) for value in kwargs.values()])
    made = [
        run(*_of_rank(whole, place), **dict(zip(kwargs, _of_rank(named, place), strict=True)))
        for place in range(len(mesh.ranks))
    ]
    joined = _joined(kind, mesh, made)
    return (
        joined if mesh is home else pytree.tree_map_only(kind, partial(_back, kind, home), joined)
    )


def of_all(mesh: Mesh) -> Mesh:
    """The mesh itself, or, for tensors of a model whose stages lie on several processes, that of the whole job.

    Every process calls an op of such a model, and wants a result that is no global tensor.
    """
    if all(mesh.at(each).in_process for each in mesh.family):
        return mesh
    size = mesh.world.size
    return mesh.at(Placement(mesh.placement.device_type, (size,), tuple(range(size))))


def _back(kind: Any, mesh: Mesh, tensor: Any) -> Any:
    """A result on the mesh of the operands."""
    return kind(*box(tensor.spec, tensor.locals, broadcast_layout(mesh.placement), mesh))


@final
class _Whole(tuple[Tensor, ...]):
    """Copies of one tensor on every rank."""


def _whole(kind: Any, op: Any, mesh: Mesh, value: Any) -> Any:
    if isinstance(value, kind):
        spec = value.spec
        target = broadcast_layout(mesh.placement)
        _, own = box(spec, value.locals, target, mesh, implicit=str(op))
        return _Whole(part.clone() for part in own)
    if isinstance(value, list | tuple):
        return [_whole(kind, op, mesh, part) for part in value]
    if isinstance(value, Tensor) and value.layout != torch.strided:
        return _Whole(value.to(mesh.device_of(rank)) for rank in mesh.ranks)
    return value


def _of_rank(value: Any, place: int) -> Any:
    if isinstance(value, _Whole):
        return value[place]
    return [_of_rank(part, place) for part in value] if isinstance(value, list) else value


def _joined(kind: Any, mesh: Mesh, made: list[Any]) -> Any:
    """The results of all ranks as one global value."""
    first = made[0]
    if isinstance(first, list | tuple):
        return tuple(_joined(kind, mesh, list(parts)) for parts in zip(*made, strict=True))
    if not isinstance(first, Tensor):
        return first
    return joined_copies(kind, mesh, made)


def joined_copies(kind: Any, mesh: Mesh, made: Sequence[Tensor]) -> Any:
    """A Broadcast tensor of the copies of all ranks of this process.

    Raises:
        UserError: when it is not strided.
    """
    if made[0].layout != torch.strided:
        raise UserError(
            f"{user_line()}: the result is {made[0].layout}, and global tensors are strided: take it of the whole "
            "tensor, x.full(), or of the dense form of what is sparse, to_dense()"
        )
    own = tuple(x.resolve_conj().resolve_neg() for x in made)
    layout = broadcast_layout(mesh.placement)
    return kind(intern(mesh, layout, own[0].shape, own[0].stride(), own[0].dtype), own)


def all_global(kind: Any, mesh: Mesh, made: Any) -> Any:
    """Results that were made of global tensors; a plain one among them, of no values of theirs, becomes global too."""
    if isinstance(made, list | tuple):
        return [all_global(kind, mesh, part) for part in made]
    plain = isinstance(made, Tensor) and not isinstance(made, kind)
    return everywhere(kind, mesh, made) if plain else made
