"""Views by strides, as reads and writes at positions of a dense tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.capture.fallback import strided
from weft.errors import UserError
from weft.tensor.divergence import user_line
from weft.tensor.views import note_copies

aten = torch.ops.aten
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
    """The elements in the order of their memory, in memory of their own."""
    return x.permute(order).clone(memory_format=torch.contiguous_format)
