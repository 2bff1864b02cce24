"""The table of what is planned: family, size, ranks and strategy of each row."""

from __future__ import annotations

from dataclasses import dataclass

from tools.real_sizes.family import Family, Shape
from tools.real_sizes.language import LANGUAGE
from tools.real_sizes.plans import KINDS, Kind
from tools.real_sizes.textbook import Grid

FAMILIES: dict[str, Family] = {family.name: family for family in LANGUAGE}


@dataclass(frozen=True)
class Row:
    """A plan to make.

    Attributes:
        family: name of it.
        shape: size of model and batch.
        kind: name of the strategy.
        grid: of the ranks; of a pipeline, stages and ranks of each.
    """

    family: str
    shape: Shape
    kind: str
    grid: Grid

    @property
    def of_kind(self) -> Kind:
        """The strategy."""
        return KINDS[self.kind]

    @property
    def name(self) -> str:
        """As it is printed and chosen by."""
        size = f"{self.shape.layers} layers, {self.shape.sequences} × {self.shape.tokens}, {self.shape.precision}"
        return f"{self.family}, {size}: {self.kind} on {'×'.join(map(str, self.grid))}"


def rows_of(family: str, shape: Shape, kinds: dict[str, Grid]) -> list[Row]:
    """Rows that share a capture."""
    return [Row(family, shape, kind, grid) for kind, grid in kinds.items()]


_EIGHT: dict[str, Grid] = {
    kind: (8,) for kind in ("data", "ZeRO 1", "ZeRO 2", "ZeRO 3", "recompute", "deduced")
}
_PIPELINES: dict[str, Grid] = {"pipeline": (4, 2), "pipeline + ZeRO 1": (4, 2)}
_64: dict[str, Grid] = {kind: (64,) for kind in ("data", "ZeRO 1", "ZeRO 3", "deduced")}
# How many layers are planned where the published number is cut.
LAYERS = 4


def _tensors(family: Family) -> dict[str, Grid]:
    if not family.columns or family.tensor < 2:
        return {}
    t = family.tensor
    return {
        "tensor": (t,),
        "tensor + sequence": (t,),
        "hybrid": (2, t),
        "hybrid + sequence": (2, t),
    }


def _experts(family: Family) -> dict[str, Grid]:
    return {"experts": (8,)} if family.experts else {}


def all_rows() -> list[Row]:
    """Every row, captures together."""
    found: list[Row] = []
    for family in FAMILIES.values():
        kinds = {**_EIGHT, **_tensors(family), **_experts(family), **_PIPELINES}
        tokens = 1024 if family.name == "GPT-2 XL" else 2048
        found += rows_of(family.name, Shape(LAYERS, tokens, 32), kinds)
        found += rows_of(family.name, Shape(LAYERS, tokens, 256), _64)
    return found


def short_rows() -> list[Row]:
    """A few of every kind."""
    return all_rows()[:4]
