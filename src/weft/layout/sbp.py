"""The SBP of one tensor along one axis of a grid of ranks: Split, Broadcast or Partial (OneFlow, section 3.1)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, TypeAlias, final, get_args

from weft.errors import LayoutError, wrong


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
        raise wrong("weft.split: dim", "a dimension, such as 0 or -1", dim, LayoutError)
    return Split(dim)


def partial(reduction: str = "sum") -> Partial:
    """The value is the `reduction` (one of `REDUCTIONS`) of what the ranks along the axis hold.

    Raises:
        LayoutError: when there is no such reduction.
    """
    found = next((known for known in REDUCTIONS if known == reduction), None)
    if found is None:
        expected = f"one of {', '.join(REDUCTIONS)}"
        raise wrong("the reduction of a partial value", expected, reduction, LayoutError)
    return Partial(found)


def parse_sbp(text: str) -> SBP:
    """Read what `str(sbp)` writes: "S(0)", "B", "P(sum)".

    Raises:
        LayoutError: when `text` is none of these.
    """
    match = re.fullmatch(r"B|S\((?P<dim>-?\d+)\)|P\((?P<reduction>\w+)\)", text.strip())
    if match is None:
        raise wrong(
            "an SBP", f'''"S(dim)", "B" or "P({"|".join(REDUCTIONS)})"''', text, LayoutError
        )
    if match["dim"] is not None:
        return Split(int(match["dim"]))
    if match["reduction"] is not None:
        return partial(match["reduction"])
    return broadcast


Reduction: TypeAlias = Literal["sum", "max", "min", "prod", "and", "or", "xor"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)

# Reducing equal values gives the value: what is Broadcast is Partial of these as it stands.
IDEMPOTENT: frozenset[Reduction] = frozenset(("max", "min", "and", "or"))
# For integers bit by bit, of booleans logically.
BITWISE: frozenset[Reduction] = frozenset(("and", "or", "xor"))
# Need an order of the values.
_ORDERED: frozenset[Reduction] = frozenset(("max", "min"))


def check_reduction(reduction: Reduction, dtype: str) -> None:
    """Check that values of `dtype` can be reduced so.

    Every dtype takes "sum" and "prod" (of booleans: or, and) but float8, all but the complex ones "max" and
    "min", booleans and integers "and", "or" and "xor".

    Raises:
        LayoutError: naming the reductions that `dtype` takes.
    """
    allowed = reductions_of(dtype)
    if reduction not in allowed:
        raise LayoutError(
            f"P({reduction}) of {dtype} has no meaning: {dtype} takes {', '.join(allowed) or 'none'}"
        )


def reductions_of(dtype: str) -> tuple[Reduction, ...]:
    """The reductions that values of `dtype` take; none of float8, which torch does not compute with."""
    if dtype.startswith("float8"):
        return ()
    whole = dtype == "bool" or "int" in dtype
    return tuple(
        reduction
        for reduction in REDUCTIONS
        if (whole or reduction not in BITWISE)
        and not (dtype.startswith("complex") and reduction in _ORDERED)
    )


def neutral(reduction: Reduction, dtype: str) -> float:
    """The value `e` of `dtype` for which reducing any `x` with `e` gives `x`.

    Raises:
        LayoutError: when `dtype` does not take the reduction.
    """
    check_reduction(reduction, dtype)
    lowest, highest = _ends(dtype)
    match reduction:
        case "sum" | "or" | "xor":
            return False if dtype == "bool" else 0
        case "prod":
            return True if dtype == "bool" else 1
        case "max":
            return lowest
        case "min":
            return highest
        case "and":
            return highest if dtype == "bool" or dtype.startswith("uint") else -1


def _ends(dtype: str) -> tuple[float, float]:
    """The lowest and the highest value of a dtype."""
    if dtype == "bool":
        return False, True
    if dtype.startswith("uint"):
        return 0, 2 ** int(dtype[4:]) - 1
    if dtype.startswith("int"):
        return -(2 ** (int(dtype[3:]) - 1)), 2 ** (int(dtype[3:]) - 1) - 1
    return -float("inf"), float("inf")
