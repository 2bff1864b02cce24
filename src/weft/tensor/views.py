"""Views that had to be copied: writing one writes what it was taken of; other copies must not go stale unseen."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from weft.errors import LayoutError
from weft.tensor.divergence import user_line

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Origin:
    """What a copied view was taken of.

    Attributes:
        source: the tensor.
        view: takes the same view of a tensor like `source`; None where its elements are no elements of `source`, such
            as real parts.
    """

    source: Any
    view: Callable[[Tensor], Tensor] | None

    def written(self, made: Any) -> Any:
        """`source` with `made` in place of the view."""
        if self.view is None:
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


def note_copies(
    source: Any, results: Sequence[Any], view: Callable[[Tensor], Any] | None = None
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
        result.origin = Origin(source, None if view is None else _one_of(view, number))
    base = base_of(source)
    base.copies = [*_living(base), *(weakref.ref(result) for _, result in copies)]


def _one_of(view: Callable[[Tensor], Any], number: int) -> Callable[[Tensor], Tensor]:
    def one(x: Tensor) -> Tensor:
        made = view(x)
        found: Tensor = made[number] if isinstance(made, list | tuple) else made
        return found

    return one


def check_writable(target: Any, written: Sequence[Any] = ()) -> None:
    """Raise LayoutError when a write to `target` would not reach a copied view that is still in use.

    Args:
        target: shares its base's memory.
        written: copies that are written too.
    """
    base = base_of(target)
    if any(all(copy() is not one for one in written) for copy in _living(base)):
        raise LayoutError(
            f"{user_line()}: {base.spec} has a view that had to be copied and would not see this write; compute a new "
            "tensor instead, or take the view of a layout that allows it"
        )


def base_of(tensor: Any) -> Any:
    """What a tensor, or whatever it was copied from, is a view of in the end; else itself."""
    tensor = tensor._base if tensor._is_view() else tensor
    origin = getattr(tensor, "origin", None)
    return tensor if origin is None else base_of(origin.source)


def _living(base: Any) -> list[Any]:
    return [copy for copy in getattr(base, "copies", ()) if copy() is not None]


def _shared(parts: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        not one.numel() or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in zip(parts, others, strict=True)
    )
