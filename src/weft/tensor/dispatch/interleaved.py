"""Stand-in tensors that forward writes to the original: copied views, and ordered copies of shares.

Variables of programs may be stored in shares. Every op gets stand-ins for them in the same layout, in the order that
users know; writes to a stand-in, or to a view of it, go to the tensor that it stands for.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, final

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakTensorKeyDictionary

from weft.capture.ops.decompositions import strided
from weft.capture.optimizers import fused
from weft.errors import LayoutError, UserError
from weft.layout import Broadcast, Layout, Shares, Split
from weft.tensor.boxing import Locals, box
from weft.tensor.divergence import user_line
from weft.tensor.spec import Mesh, Spec

aten = torch.ops.aten

# True if any tensor is stored in shares: few programs have such, and every op asks.
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


def change_layout(
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


def in_user_order(tensor: Any, implicit: str = "") -> Any:
    """A copy of a global tensor in the order that users know, as it is laid out."""
    spec = tensor.spec
    made = change_layout(spec, tensor.locals, spec.layout, spec.mesh, tensor.shares, None, implicit)
    return type(tensor)(*made)


def stand_in(tensor: Any, why: str) -> Any:
    """The tensor that an op sees in place of one that is stored in shares: an ordered copy, whose writes go there."""
    made = in_user_order(tensor, why)
    made.origin = InterleavedOrigin(tensor, partial(in_user_order, implicit=why), elements=True)
    made.hold = tensor.hold
    return made


def with_stand_ins(
    kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], dict[int, Any]]:
    """The arguments of an op, all in the order that users know.

    Ops on lists first decompose; ops that read no values, or make aliases, get the tensors unchanged.

    Raises:
        UserError: when the op would give a tensor that is stored in shares another shape.
    """
    name = op._schema.name.partition("::")[2]
    in_any_order = name.startswith("_foreach_") or name.endswith("_like")
    if in_any_order or fused.updates(op) or op in _SAME:
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
        for (
            key,
            x,
        ) in found.items():  # a stand-in, of which a view is taken, follows writes to the tensor
            base = base_of(x)
            base.copies = [*living_copies(base), weakref.ref(made[key])]

    def seen(value: Any) -> Any:
        return made.get(id(value), value)

    of = {id(made[key]): x for key, x in found.items()}
    return pytree.tree_map(seen, args), pytree.tree_map(seen, kwargs), of


def originals(made: Any, of: dict[int, Any]) -> Any:
    """The results of an op, with tensors in place of the stand-ins that it wrote."""
    if isinstance(made, list | tuple):
        return type(made)(originals(part, of) for part in made)
    return of.get(id(made), made)


# Views that had to be copied: a write to one reaches what it was taken of, and all its other copies.
#
# Views between ranks' memories cannot share it where layouts differ. So each copy remembers its source and how it was
# taken; a write goes to the source, and copies that are still in use are taken again.
#
# Views by strides are reads and writes at positions of a dense tensor.


# After so many aliases of one tensor, those that are gone are forgotten.
_PRUNED = 64


@dataclass(frozen=True, slots=True)
class ViewOrigin:
    """The tensor that a copied view was taken of.

    Attributes:
        elements: true if its elements are some of those of `source`, not their real parts or the like.
    """

    source: Any
    view: Callable[[Tensor], Tensor]
    elements: bool

    def written(self, made: Any) -> Any:
        """`source` with `made` in place of the view."""
        if not self.elements:
            raise LayoutError(
                f"{user_line()}: this view of {self.source.spec} had to be copied, so that writing it would not write "
                "its base; compute a new tensor instead, or take the view of a layout that allows it"
            )
        source = self.source
        numbers = torch.arange(source.numel(), device=source.device).view(source.shape)
        positions = self.view(numbers).reshape(-1)
        values = made.to(source.dtype).reshape(-1)
        flat = aten.index_put.default(source.reshape(-1), [positions], values)
        return flat.view(source.shape)


@final
@dataclass(frozen=True, slots=True)
class InterleavedOrigin(ViewOrigin):
    """The tensor that an ordered copy was made of, which is stored in shares (`weft.tensor.dispatch.interleaved`)."""

    def written(self, made: Any) -> Any:
        """The written values, which are the whole tensor."""
        return made


def note_copies(
    source: Any, results: Sequence[Any], view: Callable[[Tensor], Any], *, elements: bool = True
) -> None:
    """Remember which views of `source` do not share its memory; `view` takes them, one or several.

    Views of a copy count as copies, too: they share no memory with what it was copied from.
    """
    of_copy = hasattr(source, "origin")
    copies = [
        (number, result)
        for number, result in enumerate(results)
        if of_copy
        or any(
            one.numel() and one.untyped_storage().data_ptr() != other.untyped_storage().data_ptr()
            for one, other in zip(source.locals, result.locals, strict=True)
        )
    ]
    if not copies:
        return
    for number, result in copies:
        result.origin = ViewOrigin(source, _one_of(view, number), elements)
    base = base_of(source)
    base.copies = [*living_copies(base), *(weakref.ref(result) for _, result in copies)]


def _one_of(view: Callable[[Tensor], Any], number: int) -> Callable[[Tensor], Tensor]:
    def one(x: Tensor) -> Tensor:
        made = view(x)
        found: Tensor = made[number] if isinstance(made, list | tuple) else made
        return found

    return one


def living_copies(base: Any) -> list[Any]:
    """References to the copies that are still in use, in the order in which they were taken."""
    return [copy for copy in getattr(base, "copies", ()) if copy() is not None]


def base_of(tensor: Any) -> Any:
    """The tensor that another one, or whatever it was copied from, is a view of in the end; else itself."""
    tensor = tensor._base if tensor._is_view() else tensor
    origin = getattr(tensor, "origin", None)
    return tensor if origin is None else base_of(origin.source)


STRIDED = (
    aten.as_strided.default,
    aten.as_strided_copy.default,
    aten.as_strided_scatter.default,
)


def by_strides(kind: Any, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`as_strided` and its relatives.

    Raises:
        UserError: when they reach beyond the elements of the tensor, as those of a view may, or these do not lie
            densely.
    """
    names = [argument.name for argument in op._schema.arguments]
    named = dict(zip(names, args, strict=False)) | kwargs
    x, offset = named.pop("self"), named.get("storage_offset")
    order = sorted(range(x.dim()), key=lambda dim: (-x.stride(dim), -x.shape[dim]))
    first = 0 if offset is None else offset - x.storage_offset()
    steps = zip(named["size"], named["stride"], strict=True)
    last = first + sum((size - 1) * step for size, step in steps)
    inside = 0 in named["size"] or 0 <= first <= last < x.numel()
    if not inside or not aten.permute.default(x, order).is_contiguous():
        raise UserError(
            f"{user_line()}: {op} of {x.spec} with strides {list(x.stride())} reads memory that is not the tensor's; "
            "take .contiguous(), or slices and views by dimensions"
        )
    named["storage_offset"] = first
    if op is aten.as_strided_scatter.default:
        back = sorted(range(x.dim()), key=lambda i: order[i])
        return aten.permute.default(strided()[op](_row_major(x, order), **named), back)

    def read(tensor: Tensor) -> Any:
        return strided()[op](_row_major(tensor, order), **named)

    made = read(x)
    if op is aten.as_strided.default:
        note_copies(x, [made], read)
    return made


def _row_major(x: Tensor, order: list[int]) -> Tensor:
    return x.permute(order).clone(memory_format=torch.contiguous_format)


# Of what has a hold, the tensors that share its memory; and the way back. No attributes, which are the user's.
_aliases = WeakTensorKeyDictionary()
_lenders = WeakTensorKeyDictionary()


def note_aliases(kind: Any, source: Any, made: Any) -> None:
    """Let what has a hold know the results of an op that may share its memory: `tensor.data = …` parts from them."""
    lender = source if source.hold is not None else _lenders.get(source)  # type: ignore[no-untyped-call]
    if lender is None:
        return
    known = _aliases.setdefault(lender, [])  # type: ignore[no-untyped-call]
    if len(known) % _PRUNED == _PRUNED - 1:
        known[:] = [each for each in known if each() is not None]
    for each in made if isinstance(made, list | tuple) else (made,):
        if isinstance(each, kind):
            _lenders[each] = lender
            known.append(weakref.ref(each))


def parted_aliases(lender: Any) -> list[Any]:
    """The views that share the memory of an owned tensor; the owner forgets them from now on."""
    known = _aliases.pop(lender, ())  # type: ignore[no-untyped-call]
    living = [each for one in known if (each := one()) is not None]
    for each in living:
        _lenders.pop(each, None)  # type: ignore[no-untyped-call]
    return living
