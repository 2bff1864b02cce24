"""A strategy of the space, by its coordinates: grid, micro-batches, schedule, shards, recompute, ways to lay out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal, TypeAlias, TypeVar, final, get_args

from weft.layout import SBP, broadcast, split
from weft.search.steps.linears import Experts, Linears
from weft.search.steps.repeated import Blocks
from weft.strategy.parts import Zero
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs

_T = TypeVar("_T")
# "data": every parameter whole; "columns": a Megatron grid; "sequence": with activations split along positions
# between its layers; "free": whatever deduction in seconds finds.
Layouts: TypeAlias = Literal["data", "columns", "sequence", "free"]
LAYOUTS: tuple[Layouts, ...] = get_args(Layouts)
# Schedules that candidates name, beside the computed one: of ranks with a stage each, and of those with several.
ONCE, IN_TURN = ("gpipe", "1f1b", "zero_bubble"), ("interleaved",)
NAMED = (*ONCE, *IN_TURN)
SCHEDULES = ("", *NAMED)
# Names that a strategy of such a candidate is known by.
SCHEDULE_NAMES: Mapping[str, str] = {
    "": "computed",
    "gpipe": "GPipe",
    "1f1b": "1F1B",
    "interleaved": "interleaved",
    "zero_bubble": "zero bubble",
}


@final
@dataclass(frozen=True, order=True)
class Candidate:
    """A strategy of the space, by its coordinates.

    Attributes:
        data: ranks along the axis that splits the batch.
        tensor: ranks along the axis that splits layers.
        stages: groups of ranks that run the parts of a pipeline; they lie along the outermost axis.
        layouts: how the model is laid out on the tensor axis.
        micro_batches: of a step.
        schedule: of the pipeline; "" for the computed one, or for none.
        zero: level of ZeRO along the data axis; 0 for none.
        recompute: number of blocks that run again in the backward.
        outer: true if the tensor axis is outside of the data axis: neighbours share no layer.
        turns: parts of the pipeline that each group of ranks runs, in turn.
        offload: number of blocks whose results wait in host memory for the backward.
        experts: true if the experts of mixtures are split along the data axis (GShard, arXiv 2006.16668, section 3).
    """

    data: int
    tensor: int = 1
    stages: int = 1
    layouts: Layouts = "data"
    micro_batches: int = 1
    schedule: str = ""
    zero: int = 0
    recompute: int = 0
    outer: bool = False
    turns: int = 1
    offload: int = 0
    experts: bool = False

    @property
    def ranks(self) -> int:
        """The number of ranks."""
        return self.data * self.tensor * self.stages

    @property
    def _has_one_axis(self) -> bool:
        """True if a part of the pipeline has one axis."""
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
        """The strategy of this candidate."""
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
            parts.append(f"{self.stages} stages{turns} {SCHEDULE_NAMES[self.schedule]}")
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


# The coordinates of candidates by number, in columns: those with choices by the place of their choice.
COLUMNS: Mapping[str, int] = {each.name: number for number, each in enumerate(fields(Candidate))}
WIDTH = len(COLUMNS)
_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "layouts": LAYOUTS,
    "schedule": SCHEDULES,
    "zero": (0, 1, 2, 3),
    "outer": (False, True),
    "experts": (False, True),
}


def _code(name: str, found: Any) -> int:
    return _CHOICES[name].index(found) if name in _CHOICES else found


# The numbers of those that a candidate need not say; no candidate is without the others.
DEFAULTS: Mapping[str, int] = {
    each.name: _code(each.name, each.default)
    for each in fields(Candidate)
    if each.default is not MISSING
}


def row_of(candidate: Candidate) -> tuple[int, ...]:
    """The numbers of a candidate, by column."""
    return tuple(_code(name, getattr(candidate, name)) for name in COLUMNS)


def point_of(row: list[int]) -> Candidate:
    """The candidate that `row_of` gives the numbers of."""
    found: dict[str, Any] = dict(zip(COLUMNS, row, strict=True))
    return Candidate(**found | {name: every[found[name]] for name, every in _CHOICES.items()})


def may_be(name: str, found: object) -> bool:
    """True for what a coordinate may be, by its type too: True is equal to 1."""
    if name in _CHOICES:
        return found in _CHOICES[name] and type(found) is type(_CHOICES[name][0])
    least = 0 if name in ("recompute", "offload") else 1
    return isinstance(found, int) and not isinstance(found, bool) and found >= least
