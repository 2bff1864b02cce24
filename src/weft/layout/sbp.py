"""The SBP of one tensor along one axis of a grid of ranks: Split, Broadcast or Partial (OneFlow, section 3.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TypeAlias, final

from weft.errors import LayoutError
from weft.layout.reduction import REDUCTIONS, Reduction


@final
@dataclass(frozen=True, slots=True)
class Split:
    """Each rank holds one balanced piece of dimension `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@final
@dataclass(frozen=True, slots=True)
class Broadcast:
    """Each rank holds the whole tensor."""

    def __str__(self) -> str:
        return "B"


@final
@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank holds a tensor of the whole shape; the value is their `reduction` over the ranks."""

    reduction: Reduction = "sum"

    def __str__(self) -> str:
        return f"P({self.reduction})"


SBP: TypeAlias = Split | Broadcast | Partial

broadcast = Broadcast()
"""Each rank along the axis holds the whole tensor."""


def split(dim: int) -> Split:
    """Each rank along the axis holds one balanced piece of dimension `dim`; negative dimensions count from the end."""
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise LayoutError(f"weft.split takes a dimension, such as 0 or -1, found {dim!r}")
    return Split(dim)


def partial(reduction: str = "sum") -> Partial:
    """The value is the `reduction` (one of `REDUCTIONS`) of what the ranks along the axis hold.

    Raises:
        LayoutError: when there is no such reduction.
    """
    found = next((known for known in REDUCTIONS if known == reduction), None)
    if found is None:
        raise LayoutError(f"a partial value is one of {', '.join(REDUCTIONS)}, found {reduction!r}")
    return Partial(found)


def parse_sbp(text: str) -> SBP:
    """Read what `str(sbp)` writes: "S(0)", "B", "P(sum)".

    Raises:
        LayoutError: when `text` is none of these.
    """
    match = re.fullmatch(r"B|S\((?P<dim>-?\d+)\)|P\((?P<reduction>\w+)\)", text.strip())
    if match is None:
        raise LayoutError(f'an SBP is "S(dim)", "B" or "P({"|".join(REDUCTIONS)})", found {text!r}')
    if match["dim"] is not None:
        return Split(int(match["dim"]))
    if match["reduction"] is not None:
        return partial(match["reduction"])
    return broadcast
