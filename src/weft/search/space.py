"""The space that is enumerated: grids, micro-batches, schedules, shards, recompute and ways to lay a model out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias, TypeVar, final

from weft.layout import SBP, broadcast, split
from weft.search.steps.linears import Linears
from weft.strategy.parts import Schedule, Zero
from weft.strategy.strategy import Strategy
from weft.strategy.text import SBPs

_T = TypeVar("_T")
# "data": every parameter whole; "columns": a Megatron grid; "sequence": with activations split along positions
# between its layers; "free": whatever deduction in seconds finds.
Layouts: TypeAlias = Literal["data", "columns", "sequence", "free"]
# Schedules that points name, beside the computed one.
NAMED = ("gpipe", "1f1b", "zero_bubble")
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
        stages: of the pipeline, the outermost.
        layouts: how the model lies on the tensor axis.
        micro_batches: of a step.
        schedule: of the pipeline; "" for the computed one, or for none.
        zero: level of ZeRO along the data axis; 0 for none.
        recompute: true where every block runs again in the backward.
        outer: true where the tensor axis lies outside of the data axis: neighbours share no layer.
    """

    data: int
    tensor: int = 1
    stages: int = 1
    layouts: Layouts = "data"
    micro_batches: int = 1
    schedule: str = ""
    zero: int = 0
    recompute: bool = False
    outer: bool = False

    @property
    def ranks(self) -> int:
        """All that take part."""
        return self.data * self.tensor * self.stages

    @property
    def grid(self) -> tuple[int, ...]:
        """The number of ranks along each axis of the strategy; stages cut the first one."""
        if self.layouts == "data" or (self.layouts == "free" and self.tensor == 1):
            return (self.stages * self.data,)
        inner = (self.tensor, self.data) if self.outer else (self.data, self.tensor)
        return (self.stages * inner[0], inner[1])

    @property
    def by_hand(self) -> bool:
        """True where people write such strategies without a search: the result is never worse than these."""
        plain = self.layouts != "free" and not self.outer and not self.recompute
        if self.stages == 1:
            return plain and (self.layouts == "data" or self.zero < 2)
        deep = self.micro_batches in (2 * self.stages, 4 * self.stages)
        return plain and deep and self.zero == 0 and self.schedule != ""

    def strategy(self, linears: Linears, base: Strategy, recompute: str) -> Strategy:
        """The strategy of this point.

        Args:
            linears: of the model.
            base: what all strategies of the search have in common.
            recompute: pattern of the modules that run again, where they do.
        """
        batch, parameters, activations = self._layouts(linears)
        stages: int | tuple[()] = self.stages if self.stages > 1 else ()
        zero = Zero(self.zero, int(self.outer)) if self.zero else base.zero  # type: ignore[arg-type]
        return Strategy(
            batch=fixed_first(base.batch, batch),
            parameters=fixed_first(base.parameters, parameters),
            activations=fixed_first(base.activations, activations),
            signatures=base.signatures,
            stages=stages or base.stages,
            micro_batches=self.micro_batches,
            schedule=self.schedule or base.schedule,  # type: ignore[arg-type]
            zero=zero,
            recompute=(*base.recompute, *((recompute,) if self.recompute else ())),
            offload=base.offload,
            precision=base.precision,
            clip_norm=base.clip_norm,
            memory_limit=base.memory_limit,
            expert_capacity=base.expert_capacity,
            grid=() if isinstance(base.stages, tuple) and base.stages else self.grid,
        )

    def _layouts(
        self, linears: Linears
    ) -> tuple[dict[str, SBPs], dict[str, SBPs], dict[str, SBPs]]:
        if len(self.grid) == 1:
            if self.layouts == "free":
                return {}, {}, {}
            return {"*": split(0)}, {"*": broadcast}, {}
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

    def _on(self, data: SBP, tensor: SBP) -> SBPs:
        return (tensor, data) if self.outer else (data, tensor)

    def __str__(self) -> str:
        parts = [f"data {self.data}"]
        if len(self.grid) > 1:
            parts.append(f"tensor {self.tensor}{' outside' if self.outer else ''}")
        if self.layouts in ("sequence", "free"):
            parts.append({"sequence": "sequence split", "free": "free layouts"}[self.layouts])
        if self.stages > 1:
            parts.append(f"{self.stages} stages {_SCHEDULES[self.schedule or None]}")  # type: ignore[index]
        if self.micro_batches > 1:
            parts.append(f"{self.micro_batches} micro-batches")
        parts += [f"ZeRO {self.zero}"] if self.zero else []
        parts += ["recompute"] if self.recompute else []
        return ", ".join(parts)


def fixed_first(fixed: Mapping[str, _T], others: Mapping[str, _T]) -> dict[str, _T]:
    """Patterns of which the first that matches counts: those that are fixed, as they are, before all others."""
    return {**fixed, **others, **fixed}


@final
@dataclass(frozen=True)
class Sizes:
    """The sizes that say how large the space is.

    Attributes:
        ranks: numbers of ranks that may be used.
        samples: of the batch; 0 where it cannot be cut.
        blocks: that stages can be made of.
        cuts: true where there are layers that a Megatron grid cuts.
        positions: true where the activations between them have positions that can be split.
    """

    ranks: tuple[int, ...]
    samples: int
    blocks: int
    cuts: bool
    positions: bool


def points(sizes: Sizes) -> Iterator[Point]:
    """All points of the space, each once."""
    for ranks in sizes.ranks:
        for stages in _divisors(ranks):
            if stages > max(sizes.blocks, 1):
                continue
            for tensor in _divisors(ranks // stages):
                yield from _of_grid(sizes, ranks // stages // tensor, tensor, stages)


def _of_grid(sizes: Sizes, data: int, tensor: int, stages: int) -> Iterator[Point]:
    micro = [1, *_powers(sizes.samples // data)] if sizes.samples else [1]
    for micro_batches in micro:
        if sizes.samples % (data * micro_batches):
            continue
        for schedule in ("", *NAMED) if stages > 1 else ("",):
            for layouts, outer in _ways(sizes, data, tensor, stages):
                for zero in (0, 1, 2, 3) if data > 1 and layouts != "free" else (0,):
                    for recompute in (False, True) if sizes.blocks > 1 else (False,):
                        yield Point(
                            *(data, tensor, stages, layouts, micro_batches),
                            *(schedule, zero, recompute, outer),
                        )


def _ways(sizes: Sizes, data: int, tensor: int, stages: int) -> Iterator[tuple[Layouts, bool]]:
    """Ways to lay a model out on a grid, and whether the tensor axis is the outer one."""
    if tensor == 1:
        yield "data", False
    if stages == 1 and data * tensor > 1 and (tensor == 1 or data > 1):  # one axis has no two names
        yield "free", False
    if tensor == 1 or not sizes.cuts:
        return
    for outer in (False, True) if data > 1 else (False,):
        yield "columns", outer
        if sizes.positions:
            yield "sequence", outer


def _divisors(number: int) -> list[int]:
    return [each for each in range(1, number + 1) if number % each == 0]


def _powers(most: int) -> list[int]:
    """2, 4, … up to `most`."""
    return [1 << power for power in range(1, most.bit_length()) if 1 << power <= most]


def ranks_used(devices: int) -> tuple[int, ...]:
    """Numbers of ranks that are tried, all first: the divisors of the number of devices."""
    return tuple(reversed(_divisors(devices)))
