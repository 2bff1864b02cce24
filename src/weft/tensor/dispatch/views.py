"""Views that had to be copied: a write to one reaches what it was taken of, and all its other copies.

Views between ranks' memories cannot share it where layouts differ. So each copy remembers its source and how it was
taken; a write goes to the source, and copies that are still in use are taken anew.

Views by strides are reads and writes at positions of a dense tensor.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

from weft.capture.ops.fallback import strided
from weft.errors import LayoutError, UserError
from weft.tensor.divergence import user_line

aten = torch.ops.aten
# After so many aliases of one tensor, those that are gone are forgotten.
_PRUNED = 64


@dataclass(frozen=True, slots=True)
class Origin:
    """The tensor that a copied view was taken of.

    Attributes:
        elements: true where its elements are some of those of `source`, not their real parts or the like.
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
class InOrder(Origin):
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
        if of_copy or not _shared(source.locals, result.locals)
    ]
    if not copies:
        return
    for number, result in copies:
        result.origin = Origin(source, _one_of(view, number), elements)
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


def _shared(parts: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        not one.numel() or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in zip(parts, others, strict=True)
    )


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


# For what has a hold, the tensors that share its memory; and the way back. No attributes, which are the user's.
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
