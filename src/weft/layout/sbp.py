"""How one tensor lies along one axis of a grid of ranks: Split, Broadcast or Partial (OneFlow, section 3.1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

Reduction: TypeAlias = Literal["sum", "max", "min"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)


@dataclass(frozen=True, slots=True)
class Split:
    """Each rank holds one balanced piece of dimension `dim`."""

    dim: int

    def __str__(self) -> str:
        return f"S({self.dim})"


@dataclass(frozen=True, slots=True)
class Broadcast:
    """Each rank holds the whole tensor."""

    def __str__(self) -> str:
        return "B"


@dataclass(frozen=True, slots=True)
class Partial:
    """Each rank holds a tensor of the whole shape; the value is their `reduction` over the ranks."""

    reduction: Reduction = "sum"

    def __str__(self) -> str:
        return f"P({self.reduction})"


SBP: TypeAlias = Split | Broadcast | Partial
