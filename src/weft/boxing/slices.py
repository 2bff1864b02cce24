"""Reduce-scatters of large inputs run in slices, so that what arrives takes little memory beside them."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import final

from weft.ir.plan import Collective
from weft.ir.queries.memory import value_bytes
from weft.units import ITEM_SIZE, Bytes

# Of an input that is reduced and scattered, so many bytes travel at a time.
SLICE = 256 * 2**20


@final
@dataclass(frozen=True, slots=True)
class Slices:
    """A reduce-scatter in slices: every rank's piece is cut along `axis`, its `extent`, into `length` at a time.

    Attributes:
        bytes: of the pieces of a slice together.
    """

    axis: int
    extent: int
    length: int
    bytes: Bytes


def slices_of(each: Collective) -> Slices | None:
    """Slices for a reduce-scatter of a large input, to keep memory beside its result small; None to run in one go."""
    whole = value_bytes(each.input)
    if whole <= SLICE or not math.prod(each.sizes):
        return None
    piece = list(each.input.shape)
    piece[each.dim] = max(each.sizes)
    axis = max(range(len(piece)), key=piece.__getitem__)
    length = math.ceil(piece[axis] / math.ceil(whole / SLICE))
    part = len(each.sizes) * math.prod(piece) // piece[axis] * length
    return Slices(axis, piece[axis], length, Bytes(part * ITEM_SIZE[each.input.dtype]))
