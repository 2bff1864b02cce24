"""Views that had to be copied: writing one, or its base, must not go unseen by the other."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from weft.errors import LayoutError
from weft.tensor.divergence import user_line


def note_copies(source: Any, results: Sequence[Any]) -> None:
    """Remember on the base of `source` which of its views do not share its memory."""
    copies = [result for result in results if not _shared(source.locals, result.locals)]
    if copies:
        base = _base(source)
        base.copies = [*_living(base), *map(weakref.ref, copies)]


def check_writable(target: Any) -> None:
    """Raise LayoutError when a write to `target` would not reach its base, or a view that is still in use."""
    base = _base(target)
    if not _shared(target.locals, base.locals):
        raise LayoutError(
            f"{user_line()}: this view of {base.spec} had to be copied, so that writing it would not write its base; "
            "compute a new tensor instead, or take the view of a layout that allows it"
        )
    if _living(base):
        raise LayoutError(
            f"{user_line()}: {base.spec} has a view that had to be copied and would not see this write; compute a new "
            "tensor instead, or take the view of a layout that allows it"
        )


def _base(tensor: Any) -> Any:
    return tensor._base if tensor._is_view() else tensor


def _living(base: Any) -> list[Any]:
    return [copy for copy in getattr(base, "copies", ()) if copy() is not None]


def _shared(parts: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return all(
        not one.numel() or one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()
        for one, other in zip(parts, others, strict=True)
    )
