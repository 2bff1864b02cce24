"""Layouts of the values of a graph that has them."""

from __future__ import annotations

from collections import Counter

from weft.errors import InternalError
from weft.ir.logical import Value
from weft.layout import Layout, Split


def layout_of(value: Value) -> Layout:
    """The layout of a value in a graph that has layouts."""
    if value.layout is None:
        raise InternalError(f"%{value.name} has no layout")
    return value.layout


def lies_evenly(value: Value) -> bool:
    """True where all shards of a value have one shape."""
    layout, parts = layout_of(value), Counter[int]()
    for size, sbp in zip(layout.placement.shape, layout.sbp, strict=True):
        if isinstance(sbp, Split):
            parts[sbp.dim] = max(parts[sbp.dim], 1) * size
    return all(value.shape[dim] % count == 0 for dim, count in parts.items())
