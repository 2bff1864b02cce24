"""Tensors that are stored in shares, as variables of programs may be: what computes with them sees their usual order.

Every op takes stand-ins for them, which lie in the same layout, in the order that users know; what is
written to a stand-in, or to a view of it, goes to the tensor that it stands for.
"""

from __future__ import annotations

import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from weft.capture.optimizers import fused
from weft.errors import UserError
from weft.layout import Broadcast, Layout, Shares, Split
from weft.tensor.boxing import Locals, box
from weft.tensor.dispatch.views import InOrder, base_of, living_copies
from weft.tensor.divergence import user_line
from weft.tensor.spec import Mesh, Spec

aten = torch.ops.aten

# True where any tensor is stored in shares: few programs have such, and every op asks.
in_use = False

# Which leave the order as it is, and share memory.
_SAME = (aten.detach.default, aten.alias.default, aten.lift_fresh.default)
_RESHAPING = (aten.resize_.default, aten.resize_as_.default)


def stored_in(tensor: Any, shares: Shares | None) -> Any:
    """`tensor`, a global one, noted as one whose local tensors are in shares."""
    if shares is not None:
        global in_use
        in_use = True
        tensor.shares = shares
    return tensor


def in_shares(tensor: Tensor, shares: Shares | None) -> Tensor:
    """A plain tensor, whole along the dimension, in the order in which it is stored; itself without shares."""
    if shares is None:
        return tensor
    dim, shape = shares.dim, shares.in_blocks(tuple(tensor.shape))
    pieces = (
        part.reshape(*shape[: dim + 1], -1, *shape[dim + 2 :])
        for part in torch.split(tensor, list(shares.parts), dim)
    )
    return torch.cat(tuple(pieces), dim + 1).reshape(tensor.shape)


def in_order(tensor: Tensor, shares: Shares | None) -> Tensor:
    """The inverse of `in_shares`."""
    if shares is None:
        return tensor
    dim, blocks = shares.dim, tensor.reshape(shares.in_blocks(tuple(tensor.shape)))
    lengths = [part // shares.blocks for part in shares.parts]
    return torch.cat([x.flatten(dim, dim + 1) for x in torch.split(blocks, lengths, dim + 1)], dim)


def relaid(
    spec: Spec,
    locals_: Locals,
    layout: Layout,
    mesh: Mesh,
    before: Shares | None,
    after: Shares | None,
    implicit: str = "",
) -> tuple[Spec, Locals]:
    """The same tensor in another layout, and in other shares; `mesh` is that of the layout's placement."""
    if before != after:
        if before is not None:
            whole = _uncut(spec.layout, before.dim)
            spec, locals_ = box(spec, locals_, whole, spec.mesh, implicit)
            locals_ = tuple(in_order(part, before) for part in locals_)
        if after is not None:
            spec, locals_ = box(spec, locals_, _uncut(layout, after.dim), mesh, implicit)
            locals_ = tuple(in_shares(part, after) for part in locals_)
    return box(spec, locals_, layout, mesh, implicit)


def _uncut(layout: Layout, dim: int) -> Layout:
    """The layout in which every rank has all of a dimension, of what it has."""
    every = (Broadcast() if sbp == Split(dim) else sbp for sbp in layout.sbp)
    return Layout(layout.placement, tuple(every))


def check_order(tensor: Any, what: str) -> None:
    """Refuse to give away local tensors that are in shares."""
    if tensor.shares is not None:
        raise UserError(
            f"{user_line()}: {what}: {tensor.spec} is stored in {tensor.shares}, so that its local tensors hold other "
            "elements than the layout says; take it of x.to_global(sbp=x.sbp), a copy in the usual order, or x.full()"
        )


def ordered(tensor: Any, implicit: str = "") -> Any:
    """A copy of a global tensor in the order that users know, as it lies."""
    spec = tensor.spec
    made = relaid(spec, tensor.locals, spec.layout, spec.mesh, tensor.shares, None, implicit)
    return type(tensor)(*made)


def stand_in(tensor: Any, why: str) -> Any:
    """The tensor that an op sees in place of one that is stored in shares: an ordered copy, whose writes go there."""
    made = ordered(tensor, why)
    made.origin = InOrder(tensor, partial(ordered, implicit=why), elements=True)
    made.hold = tensor.hold
    return made


def with_stand_ins(
    kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Any]]:
    """The arguments of an op, all in the order that users know.

    Ops on lists take them apart first; those that read no values, or make aliases, take tensors as they are.

    Raises:
        UserError: when the op would give a tensor that is stored in shares another shape.
    """
    if _takes_any_order(op):
        return args, kwargs, {}
    every = pytree.tree_leaves((args, kwargs))
    found = {id(x): x for x in every if isinstance(x, kind) and x.shares is not None}
    if not found:
        return args, kwargs, {}
    if torch.Tag.inplace_view in op.tags or op in _RESHAPING:
        (tensor, *_) = found.values()
        raise UserError(
            f"{user_line()}: {op} of {tensor.spec}, which is stored in shares and keeps its shape; compute a new tensor"
        )
    made = {key: stand_in(x, str(op)) for key, x in found.items()}
    if any(result.alias_info is not None for result in op._schema.returns):
        for key, x in found.items():
            _note(x, made[key])

    def seen(value: Any) -> Any:
        return made.get(id(value), value)

    of = {id(made[key]): x for key, x in found.items()}
    return pytree.tree_map(seen, args), pytree.tree_map(seen, kwargs), of


def _takes_any_order(op: Any) -> bool:
    name = op._schema.name.partition("::")[2]
    return (
        fused.updates(op) or op in _SAME or name.startswith("_foreach_") or name.endswith("_like")
    )


def _note(tensor: Any, made: Any) -> None:
    """Let a stand-in, of which a view is taken, follow what is written to the tensor."""
    base = base_of(tensor)
    base.copies = [*living_copies(base), weakref.ref(made)]


def originals(made: Any, of: dict[int, Any]) -> Any:
    """The results of an op, with tensors in place of the stand-ins that it wrote."""
    if isinstance(made, list | tuple):
        return type(made)(originals(part, of) for part in made)
    return of.get(id(made), made)
