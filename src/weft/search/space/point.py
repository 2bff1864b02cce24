"""A strategy of the space, by its coordinates: grid, micro-batches, schedule, shards, recompute, ways to lay out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, Literal, TypeAlias, TypeVar, final, get_args

from weft.layout import SBP, broadcast, split
from weft.search.steps.linears import Experts, Linears
from weft.search.steps.repeated import Blocks
from weft.strategy.parts import Schedule, Zero
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs

_T = TypeVar("_T")
# "data": every parameter whole; "columns": a Megatron grid; "sequence": with activations split along positions
# between its layers; "free": whatever deduction in seconds finds.
Layouts: TypeAlias = Literal["data", "columns", "sequence", "free"]
LAYOUTS: tuple[Layouts, ...] = get_args(Layouts)
# Schedules that points name, beside the computed one: of ranks with a stage each, and of those with several.
ONCE, IN_TURN = ("gpipe", "1f1b", "zero_bubble"), ("interleaved",)
NAMED = (*ONCE, *IN_TURN)
SCHEDULES = ("", *NAMED)
# What a field says of its coordinate: what it may be; or from which whole number on, where that is not 1.
CHOICES, LEAST = "choices", "least"
# Names that a strategy of such a point is known by.
_SCHEDULES: dict[Schedule | None, str] = {
    None: "computed",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved",
    "zero_bubble": "zero bubble",
}


@final
@dataclass(frozen=True, order=True)
class Point:
    """A strategy of the space, by its coordinates.

    Attributes:
        data: ranks along the axis that splits the batch.
        tensor: ranks along the axis that splits layers.
        stages: groups of ranks that run the parts of a pipeline; they lie along the outermost axis.
        layouts: how the model lies on the tensor axis.
        micro_batches: of a step.
        schedule: of the pipeline; "" for the computed one, or for none.
        zero: level of ZeRO along the data axis; 0 for none.
        recompute: number of blocks that run again in the backward.
        outer: true where the tensor axis lies outside of the data axis: neighbours share no layer.
        turns: parts of the pipeline that each group of ranks runs, in turn.
        offload: number of blocks whose results wait in host memory for the backward.
        experts: true where the experts of mixtures are split along the data axis (GShard, arXiv 2006.16668, section 3).
    """

    data: int
    tensor: int = 1
    stages: int = 1
    layouts: Layouts = field(default="data", metadata={CHOICES: LAYOUTS})
    micro_batches: int = 1
    schedule: str = field(default="", metadata={CHOICES: SCHEDULES})
    zero: int = field(default=0, metadata={CHOICES: (0, 1, 2, 3)})
    recompute: int = field(default=0, metadata={LEAST: 0})
    outer: bool = field(default=False, metadata={CHOICES: (False, True)})
    turns: int = 1
    offload: int = field(default=0, metadata={LEAST: 0})
    experts: bool = field(default=False, metadata={CHOICES: (False, True)})

    @property
    def ranks(self) -> int:
        """All that take part."""
        return self.data * self.tensor * self.stages

    @property
    def _has_one_axis(self) -> bool:
        """True where a part of the pipeline has one axis."""
        return self.layouts == "data" or (self.layouts == "free" and self.tensor == 1)

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of ranks along each axis of the strategy; stages cut the first one."""
        inner = (self.tensor, self.data) if self.outer else (self.data, self.tensor)
        own = (self.data,) if self._has_one_axis else inner
        return (self.stages, *own) if self.turns > 1 else (self.stages * own[0], *own[1:])

    def strategy(
        self,
        linears: Linears,
        base: Strategy,
        blocks: Blocks | None,
        experts: Experts = Experts((), 0),  # noqa: B008 (frozen)
    ) -> Strategy:
        """The strategy of this point.

        Args:
            linears: of the model.
            base: what all strategies of the search have in common.
            blocks: that come again in the model.
            experts: of the model.
        """
        batch, parameters, activations = self._layouts(linears)
        if self.experts:
            split_ones = self._on(split(0)) if self._has_one_axis else self._on(split(0), broadcast)
            parameters = {**dict.fromkeys(experts.parameters, split_ones), **parameters}
        stages: int | tuple[()] = self.stages * self.turns if self.stages > 1 else ()
        axis = int(self.turns > 1) + int(self.outer)
        zero = Zero(self.zero, axis) if self.zero else None  # type: ignore[arg-type]
        return Strategy(
            batch=fixed_first(base.batch, batch),
            parameters=fixed_first(base.parameters, parameters),
            activations=fixed_first(base.activations, activations),
            signatures=base.signatures,
            stages=stages or base.stages,
            micro_batches=self.micro_batches,
            schedule=self.schedule or base.schedule,  # type: ignore[arg-type]
            in_flight=base.in_flight,
            zero=base.zero or zero,
            recompute=(*base.recompute, *_spread(self.recompute, blocks)),
            offload=(*base.offload, *_spread(self.offload, blocks)),
            precision=base.precision,
            clip_norm=base.clip_norm,
            memory_limit=base.memory_limit,
            expert_capacity=base.expert_capacity,
            grid=() if isinstance(base.stages, tuple) and base.stages else self.grid,
        )

    def _layouts(
        self, linears: Linears
    ) -> tuple[dict[str, SBPs], dict[str, SBPs], dict[str, SBPs]]:
        if self._has_one_axis:
            if self.layouts == "free":
                return {}, {}, {}
            return {"*": self._on(split(0))}, {"*": broadcast}, {}
        batch: dict[str, SBPs] = {"*": self._on(split(0), broadcast)}
        if self.layouts == "free":
            return batch, {}, {}
        parameters: dict[str, SBPs] = {}
        for pattern in linears.columns:
            cut = self._on(broadcast, split(0))
            parameters |= {f"{pattern}.weight": cut, f"{pattern}.bias": cut}
        for pattern in linears.rows:
            parameters[f"{pattern}.weight"] = self._on(broadcast, split(1))
            parameters[f"{pattern}.bias"] = self._on(broadcast, broadcast)
        if self.layouts == "columns":
            return batch, parameters, {}
        return batch, parameters, dict.fromkeys(linears.rows, self._on(split(0), split(1)))

    def _on(self, data: SBP, *tensor: SBP) -> SBPs:
        """On each axis of the grid; where groups of ranks are an axis of their own, whole on that."""
        own = (*tensor, data) if self.outer else (data, *tensor)
        every = (broadcast, *own) if self.turns > 1 else own
        return every[0] if len(every) == 1 else every

    def __str__(self) -> str:
        parts = [f"data {self.data}"]
        if not self._has_one_axis:
            parts.append(f"tensor {self.tensor}{' outside' if self.outer else ''}")
        if self.layouts in ("sequence", "free"):
            parts.append({"sequence": "sequence split", "free": "free layouts"}[self.layouts])
        if self.stages > 1:
            turns = f" in {self.turns} turns" if self.turns > 1 else ""
            parts.append(f"{self.stages} stages{turns} {_SCHEDULES[self.schedule or None]}")  # type: ignore[index]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        parts += ["experts split"] if self.experts else []
        parts += [f"ZeRO {self.zero}"] if self.zero else []
        parts += [f"{self.recompute} blocks recomputed"] if self.recompute else []
        parts += [f"{self.offload} blocks offloaded"] if self.offload else []
        return ", ".join(parts)


def _spread(count: int, blocks: Blocks | None) -> tuple[str, ...]:
    """Patterns of so many blocks, evenly spread over all: each part of a pipeline has its share."""
    if not count or blocks is None:
        return ()
    if count >= blocks.count:
        return (f"{blocks.prefix}.*",)
    whole = blocks.count
    return tuple(
        blocks.path(number)
        for number in range(whole)
        if (number + 1) * count // whole > number * count // whole
    )


def fixed_first(fixed: Mapping[str, _T], others: Mapping[str, _T]) -> dict[str, _T]:
    """Patterns of which the first that matches counts: those that are fixed, as they are, before all others."""
    return {**fixed, **others, **fixed}


# The coordinates of points: what each may be, and by which number it stands in a column.
#
# `Point` declares them, one a field; all else that goes over every coordinate goes over these.


@final
@dataclass(frozen=True)
class Coordinate:
    """A coordinate of points.

    Attributes:
        name: of the field.
        choices: what it may be; empty for whole numbers.
        least: of whole numbers.
        default: MISSING where each point says it.
    """

    name: str
    choices: tuple[Any, ...]
    least: int
    default: Any

    def code(self, found: Any) -> int:
        """The number that stands for it in a column."""
        return self.choices.index(found) if self.choices else found

    def decoded(self, code: int) -> Any:
        """The coordinate that a number in a column stands for."""
        return self.choices[code] if self.choices else code

    def may_be(self, found: object) -> bool:
        """True for what it may be, by its type too: True is equal to 1."""
        if self.choices:
            return found in self.choices and type(found) is type(self.choices[0])
        return isinstance(found, int) and not isinstance(found, bool) and found >= self.least


# In the order of the fields, which is that of columns and of files.
COORDINATES = tuple(
    Coordinate(each.name, each.metadata.get(CHOICES, ()), each.metadata.get(LEAST, 1), each.default)
    for each in fields(Point)
)
WIDTH = len(COORDINATES)
# The numbers of the columns.
COLUMNS: Mapping[str, int] = {each.name: number for number, each in enumerate(COORDINATES)}
# The numbers of those that a point need not say; no point is without the others.
DEFAULTS: Mapping[str, int] = {
    each.name: each.code(each.default) for each in COORDINATES if each.default is not MISSING
}


def row_of(point: Point) -> tuple[int, ...]:
    """The numbers of a point, by column."""
    return tuple(each.code(getattr(point, each.name)) for each in COORDINATES)


def point_of(row: list[int]) -> Point:
    """The point that `row_of` gives the numbers of."""
    return Point(*(each.decoded(code) for each, code in zip(COORDINATES, row, strict=True)))
